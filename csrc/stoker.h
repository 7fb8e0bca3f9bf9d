// The C interface of Stoker's native library: every exported function and struct, declared once.
//
// Python reads this file (src/stoker/kernels/header.py) and binds every function from it. The library carries the file's
// SHA-256, and Python refuses a library that was built from another version. Keep to the C that the parser knows: `enum`,
// `typedef struct`, and functions marked STOKER_API, with the types int32_t, int64_t, uint64_t, float, double, void, char,
// structs of this file, and pointers to them.
//
// Memory: the caller owns every buffer, input and output, and keeps it alive for the call; the library keeps no address.
// A pointer may be null only where its comment says so. Buffers that are written do not overlap others unless said so.
// Matrices are row-major and dense unless strides are given; strides count elements.
// Storage is `dtype`, STOKER_FLOAT32 or STOKER_BFLOAT16; arithmetic and sums are fp32. Parameters (weights, biases) have a
// dtype of their own, which is ignored where the parameter is null.
// `threads` is the largest number of OpenMP threads to use, at least 1; results do not depend on it.
// Kernels return a stoker_code. If it is not STOKER_OK, the contents of the output buffers are undefined.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
#define STOKER_API extern "C" __attribute__((visibility("default")))
#else
#define STOKER_API __attribute__((visibility("default")))
#endif

enum stoker_code {
  STOKER_OK = 0,
  STOKER_OUT_OF_MEMORY = 1,  // memory for intermediate results could not be allocated
  STOKER_BAD_INDEX = 2,      // an id or label is out of range; the call struct says which. Nothing was written
  STOKER_FAILED = 3,         // any other C++ exception
};

// Named like torch's dtypes. Kernels take float32 and bfloat16, collectives all of them.
enum stoker_dtype {
  STOKER_FLOAT32 = 0,
  STOKER_FLOAT64 = 1,
  STOKER_BFLOAT16 = 2,
  STOKER_FLOAT16 = 3,
  STOKER_INT8 = 4,
  STOKER_UINT8 = 5,
  STOKER_INT16 = 6,
  STOKER_INT32 = 7,
  STOKER_INT64 = 8,
  STOKER_BOOL = 9,
};

// --- The library itself --------------------------------------------------------------------------------------------------

// The SHA-256 of this file at build time, in hexadecimal.
STOKER_API const char* stoker_header_hash(void);

// The instruction set the library was built for: "baseline", "avx2" or "avx512".
STOKER_API const char* stoker_isa(void);

// How many threads a parallel region really gets when it asks for `threads`: shows which OpenMP pool the library runs on.
STOKER_API int32_t stoker_count_threads(int32_t threads);

// Writes to *ghz the mean clock of `threads` cores that are busy at the same time; 0 where it cannot be measured.
STOKER_API int32_t stoker_clock(double* ghz, int32_t threads);

// --- Virtual threads -----------------------------------------------------------------------------------------------------

// A parallel region of a kernel, all of its calls added up: what it would take on as many threads as the kernels were told.
typedef struct stoker_region {
  const char* kernel;  // the exported function
  const char* where;   // the C++ function that contains the region
  int64_t line, threads, calls;
  int64_t units;     // into how many pieces the work could be cut
  int64_t fewest;    // the same of the call that had the fewest
  double work;       // seconds of all pieces, one after the other
  double makespan;   // seconds until the last thread has finished
  double longest;    // seconds of the longest piece of all
  double measured;   // seconds that the region really took, its measurement included
} stoker_region;

// From now on every kernel runs on its calling thread alone, and its regions are recorded; 0: kernels run on real threads again,
// as they do at first. Forgets what was recorded. While it is called no kernel may run.
STOKER_API void stoker_virtual_threads(int32_t threads);

// Copies at most `room` of the recorded regions, and returns how many there are. `regions` may be null if `room` is 0.
STOKER_API int64_t stoker_regions(stoker_region* regions, int64_t room);

// --- Dropout -------------------------------------------------------------------------------------------------------------

// y = x * factor(key, row, column) for x, y (rows, columns): 0 with probability p, else 1 / (1 - p). It is its own gradient:
// called with dy it gives dx. p is rounded to a multiple of 1/65536. y may be x.
STOKER_API int32_t stoker_dropout(const void* x, void* y, int64_t rows, int64_t columns, float p, uint64_t key,
                                  int32_t dtype, int32_t threads);

// --- LayerNorm and RMSNorm -----------------------------------------------------------------------------------------------

// z = residual + dropout(x + x_bias);  y = (z - mean) * rstd * weight + bias. With `rms` the mean is taken as 0.
typedef struct stoker_layer_norm_call {
  const void* x;         // (rows, columns); backward: null if z is given
  const void* residual;  // (rows, columns) or null; backward: null if z is given
  void* z;               // (rows, columns): gets the sum in forward, which backward reads; null: it is computed again
  const void* x_bias;    // (columns) or null
  const void* weight;    // (columns)
  const void* bias;      // forward only: (columns) or null
  void* y;               // forward only: (rows, columns)
  float* stats;          // (2, rows): mean and rstd of each row; written by forward, read by backward
  const void* dy;        // backward only: (rows, columns)
  const void* dz;        // backward only: (rows, columns), the gradient of z where it was an output, or null
  void* dx;              // backward only: (rows, columns), or null if p is 0: it equals dresidual then
  void* dresidual;       // backward only: (rows, columns), the gradient of z; null if only dx is wanted
  void* dweight;         // backward only: (columns) or null
  void* dbias;           // backward only: (columns) or null
  void* dx_bias;         // backward only: (columns) or null
  int64_t rows, columns;
  uint64_t key;  // of the dropout
  float p, eps;
  int32_t rms, dtype, x_bias_dtype, weight_dtype, bias_dtype, threads;
} stoker_layer_norm_call;

STOKER_API int32_t stoker_layer_norm_forward(const stoker_layer_norm_call* call);
STOKER_API int32_t stoker_layer_norm_backward(const stoker_layer_norm_call* call);

// --- Activations ---------------------------------------------------------------------------------------------------------

enum stoker_activation {
  STOKER_GELU = 0,       // x Phi(x)
  STOKER_GELU_TANH = 1,  // the approximation by tanh
  STOKER_RELU = 2,
  STOKER_SILU = 3,  // x sigmoid(x)
};

// y = act(x + x_bias), and if `gated` times (up + up_bias). The fields with "up" count only if gated.
typedef struct stoker_activation_call {
  const void* x;        // (rows, columns), rows x_stride apart
  const void* up;       // (rows, columns), rows up_stride apart
  const void* x_bias;   // (columns) or null
  const void* up_bias;  // (columns) or null
  void* y;              // forward only: (rows, columns)
  const void* dy;       // backward only: (rows, columns)
  void* dx;             // backward only: (rows, columns), rows dx_stride apart
  void* dup;            // backward only: (rows, columns), rows dup_stride apart
  void* dx_bias;        // backward only: (columns) or null
  void* dup_bias;       // backward only: (columns) or null
  int64_t x_stride, up_stride, dx_stride, dup_stride, rows, columns;
  int32_t kind, gated, dtype, bias_dtype, threads;  // kind: stoker_activation
} stoker_activation_call;

STOKER_API int32_t stoker_activation_forward(const stoker_activation_call* call);
STOKER_API int32_t stoker_activation_backward(const stoker_activation_call* call);

// --- Embeddings ----------------------------------------------------------------------------------------------------------

// Rows of one table, and the gradient of the table.
typedef struct stoker_embedding_call {
  const int64_t* ids;  // (tokens)
  const void* table;   // lookup only: (rows, columns) of table_dtype
  void* y;             // lookup only: (tokens, columns) of table_dtype
  const void* dy;      // scatter only: (tokens, columns) of dtype
  void* dtable;        // scatter only: (rows, columns) of table_dtype, written in full
  int64_t tokens, rows, columns;
  int64_t skip;       // scatter only: a row that gets no gradient, or -1
  int64_t bad_token;  // result of lookup with STOKER_BAD_INDEX: the first token whose id is not a row
  int32_t dtype, table_dtype, threads;
} stoker_embedding_call;

// y[token] = table[ids[token]].
STOKER_API int32_t stoker_embedding_lookup(stoker_embedding_call* call);

// dtable[row] = the sum of dy over the tokens with that id, in their order; 0 where there is none. Ids must be in range.
STOKER_API int32_t stoker_embedding_scatter(const stoker_embedding_call* call);

// z = sum of table_k[ids_k];  y = dropout((z - mean) * rstd * weight + bias).
typedef struct stoker_embedding_norm_call {
  const int64_t* ids[3];  // (tokens) each, null where there is no such table; the first is always there
  const void* tables[3];  // (table_rows[k], columns) of table_dtype, null as ids
  int64_t table_rows[3];  // forward only
  const void* weight;     // (columns)
  const void* bias;       // forward only: (columns) or null
  void* y;                // forward only: (tokens, columns) of dtype
  float* stats;           // (2, tokens): mean and rstd; written by forward, read by backward
  const void* dy;         // backward only: (tokens, columns) of dtype
  float* dz;              // backward only: (tokens, columns), the gradient of z, for stoker_embedding_scatter
  void* dweight;          // backward only: (columns) or null
  void* dbias;            // backward only: (columns) or null
  int64_t tokens, columns;
  int64_t bad_table, bad_token;  // result of forward with STOKER_BAD_INDEX: the first id that is not a row, and its table
  uint64_t key;                  // of the dropout
  float p, eps;
  int32_t table_dtype, dtype, weight_dtype, bias_dtype, threads;
} stoker_embedding_norm_call;

STOKER_API int32_t stoker_embedding_norm_forward(stoker_embedding_norm_call* call);
STOKER_API int32_t stoker_embedding_norm_backward(const stoker_embedding_norm_call* call);

// --- Cross entropy -------------------------------------------------------------------------------------------------------

// loss = log(sum_j exp(logits_j)) - logits_label for each row; rows whose label is `ignore` have loss 0 and gradient 0.
typedef struct stoker_cross_entropy_call {
  const void* logits;     // (rows, columns)
  const int64_t* labels;  // (rows)
  float* loss;            // forward only: (rows)
  float* stats;           // (2, rows): maximum, and log of the sum; written by forward, read by backward
  double* totals;         // forward only: (2): the sum of the losses, and how many rows have a label
  const float* scales;    // backward only: (rows), the gradient of each row's loss
  void* dlogits;          // backward only: (rows, columns)
  int64_t rows, columns, ignore;
  int64_t bad_row;  // result of forward with STOKER_BAD_INDEX: the first row whose label is neither a column nor `ignore`
  int32_t dtype, threads;
} stoker_cross_entropy_call;

STOKER_API int32_t stoker_cross_entropy_forward(stoker_cross_entropy_call* call);
STOKER_API int32_t stoker_cross_entropy_backward(const stoker_cross_entropy_call* call);

// Loss and gradient of a block of fp32 logits, in place:  l = scale * logits, then softcap * tanh(l / softcap) if softcap is
// not 0;  loss = (1 - s) (lse - l_label) + s (lse - mean(l)) + z_loss * lse^2,  s = label_smoothing,  lse = log(sum_j exp(l_j)).
typedef struct stoker_cross_entropy_block_call {
  float* logits;          // (rows, columns); overwritten: with `scales` by their gradient, else undefined
  const int64_t* labels;  // (rows), each a column
  const float* scales;    // (rows), the gradient of each row's loss; null if no gradient is wanted
  float* loss;            // (rows)
  float* entropy;         // (rows) -sum_j p_j log(p_j), p = softmax(l); or null
  int32_t* top;           // (rows) 1 if no column before the label is as large as it, and none after it larger, else 0; or null
  int64_t rows, columns;
  float scale, softcap, label_smoothing, z_loss;  // scale > 0; the others 0 or more
  int32_t threads;
} stoker_cross_entropy_block_call;

STOKER_API int32_t stoker_cross_entropy_block(const stoker_cross_entropy_block_call* call);

// --- Attention -----------------------------------------------------------------------------------------------------------

// out = dropout(softmax(cap(scale * q k^T) + bias)) v within each sequence; sequences lie end to end without padding. heads is a
// multiple of kv_heads. cap(s) = softcap * tanh(s / softcap). A head's sink is one more score of every query, for a key without a
// value: it only adds to the sum of exponentials. With cosine and sine, the first 2 * rotary_half numbers of q and k are rotated
// as they are read, and their gradients rotated back. With tables of relative positions, the score of query i and key j before
// the cap is scale * (q_i k_j + q_i position_k[r] + k_j position_q[r]), r = distance_rows[reach - 1 + i - j]; kv_heads is heads
// then, and there is neither cosine nor a second key_starts.
typedef struct stoker_attention_call {
  const void* q;        // (tokens, heads, head_size), by the strides below; the last dimension is dense
  const void* k;        // (key tokens, kv_heads, head_size), likewise
  const void* v;        // as k
  void* out;            // (tokens, heads, head_size), dense; written by forward, read by backward
  float* lse;           // (tokens, heads): log of the sum of exponentials; written by forward, read by backward
  const void* dout;     // backward only: as out
  void* dq;             // backward only: strides as q
  void* dk;             // backward only: strides as k
  void* dv;             // backward only: strides as v
  const float* bias;    // (heads, bias_rows, bias_columns) or null: rows are queries, columns keys
  float* dbias;         // backward only: (groups, heads, bias_rows, bias_columns) or null; the gradient is in the first of them
  const float* sinks;   // (heads) or null
  float* dsinks;        // backward only: (heads), or null; needs sinks
  float* dq_parts;      // backward only: (key chunks, tokens, heads, head_size); null if no sequence exceeds a key chunk
  const float* cosine;  // (tokens, rotary_half) or null; null if keys have lengths of their own
  const float* sine;    // as cosine
  const void* position_q;  // (position_rows, heads, head_size), rows position_q_row apart, or null
  const void* position_k;  // as position_q, rows position_k_row apart
  float* dposition_q;      // backward only: (groups, position_rows, heads, head_size) or null; the gradient is in the first
  float* dposition_k;      // as dposition_q
  const int64_t* distance_rows;  // (2 * reach - 1) a row of the position tables for each distance from 1 - reach; null without
  const int64_t* starts;      // (sequences + 1) cumulative lengths, from 0
  const int64_t* key_starts;  // the same for k and v: the address of starts, or lengths of their own (cross attention)
  int64_t sequences, heads, kv_heads, head_size, rotary_half, bias_rows, bias_columns;
  int64_t position_rows, position_q_row, position_k_row, reach;  // reach: at least the longest sequence
  int64_t groups;                // backward only: in how many parts the gradients of bias and positions are summed
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  int64_t left, right;  // how many keys before and after its own position a query sees; 2^62 each if keys have own lengths
  uint64_t key;         // of the dropout
  float scale, softcap, p;  // softcap: 0 if scores are not capped
  int32_t dtype, threads;
} stoker_attention_call;

// Keys per key chunk, for the size of dq_parts: a sequence has ceil(keys / this) of them.
STOKER_API int64_t stoker_attention_key_chunk(void);

STOKER_API int32_t stoker_attention_forward(const stoker_attention_call* call);
STOKER_API int32_t stoker_attention_backward(const stoker_attention_call* call);

// --- Products ------------------------------------------------------------------------------------------------------------

// A matrix: element (i, j) is data[i * row_stride + j * column_stride], and one of the strides is 1.
typedef struct stoker_operand {
  const void* data;
  int64_t row_stride, column_stride;
  int32_t dtype;
} stoker_operand;

// c = sum over the terms of a_t b_t, plus bias, plus c itself if `accumulate`. Several terms are the gradient of an input that
// several weights share.
//
// With a microkernel, b is rounded to the type of a, which all terms share. It is a function of libtorch,
//   void at::native::cpublas::brgemm(int64_t rows, int64_t columns, int64_t depth, int64_t a_stride, int64_t b_stride,
//                                    int64_t c_stride, bool accumulate, const T* a, const T* b, float* c, bool pairs),
// where T is the type of a; for bf16, `pairs` is true and b has two rows in each of its own, number by number.
typedef struct stoker_product_call {
  const stoker_operand* a;  // (terms) matrices of (rows, depths[t])
  const stoker_operand* b;  // (terms) matrices of (depths[t], columns)
  const int64_t* depths;    // (terms)
  void* c;                  // (rows, columns) of c_dtype, rows c_stride apart
  const void* bias;         // (columns) or null
  void* microkernel;        // null: Stoker's own register tiles
  void* release;            // void at::native::cpublas::brgemm_release(bool pairs), called by each thread after its work, or null
  int64_t terms, rows, columns, c_stride;
  int32_t c_dtype, bias_dtype, accumulate, threads;
} stoker_product_call;

STOKER_API int32_t stoker_product(const stoker_product_call* call);

// sums (columns) = the sums of the columns of x (rows, columns), rows row_stride apart.
typedef struct stoker_column_sums_call {
  const void* x;
  void* sums;  // of sums_dtype; they are summed in fp32
  int64_t row_stride, rows, columns;
  int32_t dtype, sums_dtype, threads;
} stoker_column_sums_call;

STOKER_API int32_t stoker_column_sums(const stoker_column_sums_call* call);

// One fp32 product c = a b, plus bias, plus c itself if `accumulate`, by a BLAS that the caller has found. `sgemm` is the Fortran function
//   void sgemm_(const char* transa, const char* transb, const int* m, const int* n, const int* k, const float* alpha, const float* a,
//               const int* lda, const float* b, const int* ldb, const float* beta, float* c, const int* ldc).
typedef struct stoker_blas_call {
  void* sgemm;
  const void* a;     // (rows, depth); one of its strides is 1
  const void* b;     // (depth, columns); one of its strides is 1
  float* c;          // (rows, columns), rows c_stride apart
  const void* bias;  // (columns) of bias_dtype or null; not with `accumulate`
  int64_t rows, columns, depth;
  int64_t a_row, a_column, b_row, b_column, c_stride;  // strides
  int32_t bias_dtype, accumulate, threads;
} stoker_blas_call;

STOKER_API int32_t stoker_blas_product(const stoker_blas_call* call);

// --- Rows ----------------------------------------------------------------------------------------------------------------

// z = x + y for (rows, columns) each, z = x if y is null, z = y if x is null, and z = x * factor as stoker_dropout has it if p is
// not 0; y is null then. y is rounded to `dtype` first; with a y_stride of 0 it is a bias. z may be x or y.
typedef struct stoker_rows_call {
  const void* x;  // rows x_stride apart, or null
  const void* y;  // of y_dtype, rows y_stride apart, or null
  void* z;        // rows z_stride apart
  int64_t x_stride, y_stride, z_stride, rows, columns;
  uint64_t key;  // of the dropout
  float p;
  int32_t dtype, y_dtype, threads;
} stoker_rows_call;

STOKER_API int32_t stoker_add_rows(const stoker_rows_call* call);

// z = factor * x for (rows, columns) each, rounded to z_dtype. With a factor of 1 it converts, or copies. z may be x, if it has its type.
typedef struct stoker_scale_call {
  const void* x;  // of dtype, rows x_stride and columns x_column apart
  void* z;        // of z_dtype, rows z_stride apart
  int64_t x_stride, x_column, z_stride, rows, columns;
  float factor;
  int32_t dtype, z_dtype, threads;
} stoker_scale_call;

STOKER_API int32_t stoker_scale_rows(const stoker_scale_call* call);

// --- Masks ---------------------------------------------------------------------------------------------------------------

// The tokens of a mask (rows, columns): where they begin in each row, how many there are, and where each of them is. Called with a
// null `index` it counts; called again with that result it fills index, positions and starts.
typedef struct stoker_mask_call {
  const void* mask;     // a byte for each position, not 0 at tokens
  int64_t* firsts;      // (rows) the column of the first token; 0 if there is none
  int64_t* counts;      // (rows)
  int64_t* index;       // (tokens) row * columns + column of each token, in order; or null
  int64_t* positions;   // (tokens) which token of its row it is
  int64_t* starts;      // (sequences + 1) the first token of each row that has one, and the end
  int64_t rows, columns;
  int64_t tokens, longest, sequences, shifted, broken;  // results: rows with tokens, those that do not begin with one, and those
                                                        // whose tokens do not follow each other
} stoker_mask_call;

STOKER_API int32_t stoker_read_mask(stoker_mask_call* call);

// --- Programs ------------------------------------------------------------------------------------------------------------

// A kernel of a program: a function of this file that takes a pointer to its call struct, and that struct.
typedef struct stoker_step {
  void* function;
  void* call;
} stoker_step;

// A field of 8 bytes in a call struct that is set before the program runs: to bases[base] + offset, or to 0 if that base is 0.
typedef struct stoker_slot {
  void* field;
  int64_t base, offset;
} stoker_slot;

typedef struct stoker_program {
  const stoker_step* steps;
  const stoker_slot* slots;
  int64_t step_count, slot_count;
} stoker_program;

// Sets the slots and runs the steps in order; returns the first code that is not STOKER_OK. Addresses are the first bases of a call:
// inputs, outputs, workspaces, parameters; others are numbers, such as the keys of dropout. One thread at a time may run a program.
STOKER_API int32_t stoker_run(const stoker_program* program, const int64_t* bases);

// --- Quantized weights ---------------------------------------------------------------------------------------------------

// A weight (rows, columns) in fewer bits. i counts its elements row by row.
//   4 bits: value_i = level[code_i] * scales[i / 64], with the 16 levels of NF4; two codes in a byte, that of even i in the upper
//           half, as bitsandbytes stores them. If the number of elements is odd, the last half is the code of 0.
//   8 bits: value_i = code_i * scales[row] / 127; a code is a signed byte.
typedef struct stoker_quantized_call {
  void* values;   // (rows, columns) of dtype; quantize reads them, and they must be finite; dequantize writes them
  void* codes;    // 4 bits: rows * columns / 2 bytes, rounded up; 8 bits: rows * columns bytes
  float* scales;  // the largest absolute value of each block of 64 elements (4 bits) or of each row (8 bits)
  int64_t rows, columns;
  int32_t bits, dtype, threads;
} stoker_quantized_call;

STOKER_API int32_t stoker_quantize(const stoker_quantized_call* call);
STOKER_API int32_t stoker_dequantize(const stoker_quantized_call* call);

// --- Tensors of torch ----------------------------------------------------------------------------------------------------

// How the memory of many tensors is found without Python. All but the last two are functions of torch's stable C interface
// (torch/csrc/inductor/aoti_torch/c/shim.h), with the codes that they return; the caller looks them up in libtorch.
typedef struct stoker_tensor_functions {
  void* is_defined;     // int32_t aoti_torch_is_defined(AtenTensorHandle, bool*)
  void* layout;         // int32_t aoti_torch_get_layout(AtenTensorHandle, int32_t*)
  void* device_type;    // int32_t aoti_torch_get_device_type(AtenTensorHandle, int32_t*)
  void* dtype;          // int32_t aoti_torch_get_dtype(AtenTensorHandle, int32_t*)
  void* is_contiguous;  // int32_t aoti_torch_is_contiguous(AtenTensorHandle, bool*)
  void* numel;          // int32_t aoti_torch_get_numel(AtenTensorHandle, int64_t*)
  void* data_ptr;       // int32_t aoti_torch_get_data_ptr(AtenTensorHandle, void**)
  void* grad;           // const at::Tensor& c10::TensorImpl::grad() const
  void* bump_version;   // void torch::autograd::impl::bump_version(const at::Tensor&)
  int32_t strided, cpu, float32, bfloat16;
} stoker_tensor_functions;

// Finds the memory of tensors, or of their gradients. Each must be dense, on the CPU, and of the expected type and size.
typedef struct stoker_read_call {
  const stoker_tensor_functions* functions;
  const void* const* tensors;   // (count) the c10::TensorImpl of each, alive during the call; null is a tensor that does not exist
  const int32_t* dtypes;        // (count) stoker_dtype: STOKER_FLOAT32 or STOKER_BFLOAT16
  const int64_t* expected;      // (count) elements of each, or null: any number
  void** addresses;             // (count) result: null where there is no tensor or no gradient
  int64_t* sizes;               // (count) result: elements of each, 0 where there is none
  int64_t count;
  int64_t found;       // result: how many exist
  int64_t unreadable;  // result: the first that is not as it must be, or -1; then the other results are undefined
  int32_t gradients;   // not 0: the gradients of the tensors are read
} stoker_read_call;

STOKER_API int32_t stoker_read_tensors(stoker_read_call* call);

// Tells autograd that the tensors of `call` were changed in place, or their gradients if `gradients` is not 0: those whose address is
// not null, after stoker_read_tensors.
STOKER_API int32_t stoker_count_changes(const stoker_read_call* call, int32_t gradients);

// --- Gradient clipping ---------------------------------------------------------------------------------------------------

// Writes to *norm the Euclidean norm of `count` dense fp32 tensors, taken as one vector. sizes: elements of each.
STOKER_API int32_t stoker_gradient_norm(const float* const* tensors, const int64_t* sizes, int64_t count, double* norm,
                                        int32_t threads);

// Multiplies them all by `factor`, in place.
STOKER_API int32_t stoker_scale_gradients(float* const* tensors, const int64_t* sizes, int64_t count, float factor,
                                          int32_t threads);

// --- AdamW and Adam ------------------------------------------------------------------------------------------------------

// What the tensors begin .. end - 1 of a call have in common.
typedef struct stoker_adamw_group {
  double lr, beta1, beta2, weight_decay, eps;
  int64_t begin, end;
  int32_t decoupled;  // not 0: weight decay shrinks the parameter (AdamW); 0: it is added to the gradient (Adam)
  int32_t amsgrad, maximize;
} stoker_adamw_group;

// One update of many parameters, with the arithmetic of torch's fused optimizers, in place. Each array has one entry per tensor.
typedef struct stoker_adamw_call {
  void* const* parameters;       // of dtypes[i]
  const void* const* gradients;  // of dtypes[i]; a parameter whose gradient is null is left alone, and so is its state
  void* const* exp_avg;          // of dtypes[i]
  void* const* exp_avg_sq;       // of dtypes[i]
  void* const* max_exp_avg_sq;   // of dtypes[i]; read only for groups with amsgrad
  float* const* steps;           // one number each: how many updates there were; gets one more
  const int64_t* sizes;          // elements
  const int32_t* dtypes;         // STOKER_FLOAT32 or STOKER_BFLOAT16
  const stoker_adamw_group* groups;
  int64_t group_count;
  int32_t threads;
} stoker_adamw_call;

STOKER_API int32_t stoker_adamw(const stoker_adamw_call* call);

// --- Collectives through shared memory -----------------------------------------------------------------------------------
//
// A group is the ranks of one host. Each rank has a handle of it, made by create or attach and freed by destroy. One thread at a
// time may call collectives of a handle; abort may be called from any thread. Collectives return a stoker_comm_code;
// stoker_comm_error() returns the error message.

enum stoker_comm_code {
  STOKER_COMM_OK = 0,
  STOKER_COMM_TIMEOUT = 1,   // a rank did not call the collective in time
  STOKER_COMM_DEAD = 2,      // a rank has died or left
  STOKER_COMM_DISAGREE = 3,  // the ranks have called different collectives
  STOKER_COMM_ABORTED = 4,   // a rank aborted, or failed before
  STOKER_COMM_ARGUMENT = 5,  // an invalid argument
  STOKER_COMM_SYSTEM = 6,    // a system call failed, or there is no memory
};

// Named like torch.distributed.ReduceOp.
enum stoker_reduction {
  STOKER_SUM = 0,
  STOKER_AVG = 1,
  STOKER_PRODUCT = 2,
  STOKER_MIN = 3,
  STOKER_MAX = 4,
  STOKER_BAND = 5,
  STOKER_BOR = 6,
  STOKER_BXOR = 7,
};

// Creates a group of `ranks` and returns the handle of `rank`. Slots are whole pages with at least 64 bytes per rank. `named`: a
// POSIX shared memory object instead of a memfd. Null on failure; stoker_comm_opening_error() says why.
STOKER_API void* stoker_comm_create(int32_t ranks, int32_t rank, int64_t slot_bytes, int32_t named);

// The handle of `rank` in the group at `address`; null on failure.
STOKER_API void* stoker_comm_attach(const char* address, int32_t rank);

// Why the last create or attach of this thread failed. Valid until the next one.
STOKER_API const char* stoker_comm_opening_error(void);

// The address that other processes attach to. Valid as long as the handle.
STOKER_API const char* stoker_comm_address(void* group);

// Waits until all ranks are attached, at most `seconds`: -1 if they are, else the first rank that is not.
STOKER_API int32_t stoker_comm_await_all(void* group, double seconds);

// Removes the address; no process can attach any more.
STOKER_API void stoker_comm_seal(void* group);

// Leaves the group and frees the handle.
STOKER_API void stoker_comm_destroy(void* group);

// Ends every collective of the group, on all ranks, with STOKER_COMM_ABORTED and the reason `why`.
STOKER_API void stoker_comm_abort(void* group, const char* why);

// Why the last collective of this handle failed. Valid until the next one.
STOKER_API const char* stoker_comm_error(void* group);

// How long a collective waits for another rank, in seconds.
STOKER_API void stoker_comm_timeout(void* group, double seconds);

// The numbers of the ranks (one per rank) in error messages.
STOKER_API void stoker_comm_names(void* group, const int64_t* ranks);

// data = op over the data of all ranks, in place: on rank `root`, or on all if root is -1. On other ranks data is undefined.
STOKER_API int32_t stoker_comm_allreduce(void* group, void* data, int64_t count, int32_t dtype, int32_t op, int32_t root);

// Rank r gets in `to` the op over sources[r] of all ranks. counts: elements of each source.
STOKER_API int32_t stoker_comm_reduce_scatter(void* group, const void* const* sources, void* to, const int64_t* counts,
                                              int32_t dtype, int32_t op);

// Every rank gets in to[r] the source of rank r. bytes: the length of each.
STOKER_API int32_t stoker_comm_allgather(void* group, const void* source, void* const* to, const int64_t* bytes);

// Every rank gets the data of rank `root`.
STOKER_API int32_t stoker_comm_broadcast(void* group, void* data, int64_t bytes, int32_t root);

// Rank `root` gets in to[r] the source of rank r; `to` may be null on the other ranks.
STOKER_API int32_t stoker_comm_gather(void* group, const void* source, void* const* to, int64_t bytes, int32_t root);

// Rank r gets in `to` what rank `root` has in sources[r]; `sources` may be null on the other ranks.
STOKER_API int32_t stoker_comm_scatter(void* group, const void* const* sources, void* to, int64_t bytes, int32_t root);

// Rank r gets in to[s] what rank s has in sources[r]. sent and received: bytes for and from each rank.
STOKER_API int32_t stoker_comm_alltoall(void* group, const void* const* sources, const int64_t* sent, void* const* to,
                                        const int64_t* received);

// Returns when all ranks have called it.
STOKER_API int32_t stoker_comm_barrier(void* group);

// A pipe of bytes leads from every rank to every other. These calls do not wait, except for sleep; one thread at a time may call
// them, beside the one that calls collectives.
// Bytes that were accepted, from the beginning of `data`, or -1: there is no memory (stoker_comm_opening_error). Then the group
// has failed on all ranks.
STOKER_API int64_t stoker_comm_write(void* group, int32_t to, const void* data, int64_t bytes);

// Bytes that were there, at most `bytes`.
STOKER_API int64_t stoker_comm_read(void* group, int32_t source, void* data, int64_t bytes);

// Changes with every write to this rank, and with every read by others of what this rank wrote.
STOKER_API int64_t stoker_comm_bell(void* group);

// Sleeps until the bell is no longer `seen`, at most `seconds`: 1 if it has changed, else 0. ring ends a sleep of this rank.
STOKER_API int32_t stoker_comm_sleep(void* group, int64_t seen, double seconds);
STOKER_API void stoker_comm_ring(void* group);

// "has died", "has left the group", "gave up: " and the reason, or null for a rank that is there.
STOKER_API const char* stoker_comm_gone(void* group, int32_t rank);
