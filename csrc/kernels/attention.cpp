// Attention over sequences of different lengths, laid end to end without padding.
//
//   P = softmax(cap(scale * Q K^T) + bias), O = dropout(P) V, one sequence and head at a time.
//
// Scores of relative positions, which are added before the cap, are in kernels/relative_positions.h.
//
// Scores exist only as a block of 64 queries by at most 512 keys in cache. Forward keeps the output and the log of each row's
// sum of exponentials; backward computes the blocks again.
//
// A task is a sequence and head, or less of it where threads are many: some queries in forward, some keys and one of several heads
// that share a key/value head in backward. Sums over what may be cut always run part by part, by shape alone, and the parts are
// added in their order, by one task or by the last of several: results do not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "core/buffer.h"
#include "core/gemm.h"
#include "core/math.h"
#include "core/parallel.h"
#include "core/random.h"
#include "core/types.h"
#include "kernels/attention_blocks.h"
#include "kernels/relative_positions.h"

namespace stoker {

namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Rows [first, first + count) of one head as dense fp32 times `scale`, rotated where the model asks for it.
template <typename Scalar>
void load_rows(const Scalar* from, int64_t token_stride, int64_t first, int64_t count, const stoker_attention_call& call,
               bool rotate, float scale, float* to) {
  const int64_t size = call.head_size, half = rotate && call.cosine ? call.rotary_half : 0;
  for (int64_t row = 0; row < count; ++row, to += size) {
    const Scalar* source = from + (first + row) * token_stride;
    if (half) {
      const float* cosine = call.cosine + (first + row) * half;
      const float* sine = call.sine + (first + row) * half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float x = load(source[i]) * scale, y = load(source[half + i]) * scale;
        to[i] = x * cosine[i] - y * sine[i];
        to[half + i] = y * cosine[i] + x * sine[i];
      }
    }
#pragma omp simd
    for (int64_t i = 2 * half; i < size; ++i) to[i] = load(source[i]) * scale;
  }
}

// The reverse, for gradients: scale, rotate back, store.
template <typename Scalar>
void store_rows(const float* from, int64_t from_stride, int64_t first, int64_t count, const stoker_attention_call& call, bool rotate,
                float scale, Scalar* to, int64_t token_stride) {
  const int64_t size = call.head_size, half = rotate && call.cosine ? call.rotary_half : 0;
  for (int64_t row = 0; row < count; ++row, from += from_stride) {
    Scalar* target = to + (first + row) * token_stride;
    if (half) {
      const float* cosine = call.cosine + (first + row) * half;
      const float* sine = call.sine + (first + row) * half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        const float x = from[i] * scale, y = from[half + i] * scale;
        store(target + i, x * cosine[i] + y * sine[i]);
        store(target + half + i, y * cosine[i] - x * sine[i]);
      }
    }
#pragma omp simd
    for (int64_t i = 2 * half; i < size; ++i) store(target + i, from[i] * scale);
  }
}

template <typename A, typename B>
float dot(const A* a, const B* b, int64_t size) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) sum += load(a[i]) * load(b[i]);
  return sum;
}

// The rows of one sequence among those of all.
struct Span {
  int64_t start, length;
};

Span span(const int64_t* starts, int64_t sequence) { return {starts[sequence], starts[sequence + 1] - starts[sequence]}; }

// The keys of [first, last) that one of the queries may see.
KeyRange visible(const stoker_attention_call& call, int64_t first_query, int64_t last_query, int64_t first, int64_t last) {
  return {std::max(first, first_query - std::min(call.left, first_query)),
          call.right >= last - last_query ? last : std::min(last, last_query + call.right + 1)};
}

// Caps a row of scores, adds the bias and puts -inf where `query` may not look. `scores` stands for keys [begin, end).
// Where scores are capped, `slopes` gets the derivative of the cap.
void finish_scores(const stoker_attention_call& call, int64_t head, int64_t query, int64_t begin, int64_t end, float* scores,
                   float* slopes) {
  if (call.softcap > 0.0f) {
    const float cap = call.softcap, inverse = 1.0f / cap;
#pragma omp simd
    for (int64_t j = 0; j < end - begin; ++j) {
      const float t = tanh(scores[j] * inverse);
      slopes[j] = 1.0f - t * t;
      scores[j] = cap * t;
    }
  }
  if (call.bias) {
    const float* bias = call.bias + (head * call.bias_rows + query) * call.bias_columns + begin;
#pragma omp simd
    for (int64_t j = 0; j < end - begin; ++j) scores[j] += bias[j];
  }
  const KeyRange seen = visible(call, query, query, begin, end);
  for (int64_t j = begin; j < std::min(seen.begin, end); ++j) scores[j - begin] = kNegativeInfinity;
  for (int64_t j = std::max(seen.end, begin); j < end; ++j) scores[j - begin] = kNegativeInfinity;
}

// Dropout factors of one row for keys [begin, end), written so that factors[0] belongs to `begin`.
// `buffer` holds whole groups; returns the address of the first factor asked for.
const float* row_factors(const Dropout& dropout, uint64_t row, int64_t begin, int64_t end, float* buffer) {
  const int64_t first_group = begin / kRandomGroup, last_group = (end + kRandomGroup - 1) / kRandomGroup;
  for (int64_t group = first_group; group < last_group; ++group)
    dropout_factors(dropout, row, static_cast<uint32_t>(group), buffer + (group - first_group) * kRandomGroup);
  return buffer + (begin - first_group * kRandomGroup);
}

// The work of a task is counted in scores.
constexpr int64_t kTasksPerThread = 3;

// What a task may cost so that all threads are busy to the end. Less than one block of scores is not worth a task.
int64_t task_limit(int64_t work, int threads) { return std::max(kQueryBlock * kQueryBlock, work / (kTasksPerThread * threads)); }

struct ForwardTask {
  int64_t sequence, head, first_query, queries, work;
};

template <typename Scalar>
void forward_task(const stoker_attention_call& call, const Dropout& dropout, const ForwardTask& task) {
  const int64_t size = call.head_size, width = round_up(size, kPanel);
  const Span own = span(call.starts, task.sequence), other = span(call.key_starts, task.sequence);
  const int64_t start = own.start, key_start = other.start, key_length = other.length;
  const int64_t queries = task.queries;
  const int64_t kv_head = task.head / (call.heads / call.kv_heads);
  const Scalar* q = static_cast<const Scalar*>(call.q) + task.head * call.q_head;
  RelativePositions positions(call, false);

  Scratch& scratch = Scratch::of_this_thread();
  scratch.reserve(kKeyBlock * size * 2 + kKeyBlock * width + kQueryBlock * (size + kScoreStride) + kQueryChunk * (width + 2) +
                  kKeyBlock + 2 * kRandomGroup + 1024 + positions.floats(own.length));
  float* rows = scratch.take(kKeyBlock * size);
  float* key_panels = scratch.take(round_up(kKeyBlock, kPanel) * size);
  float* value_panels = scratch.take(kKeyBlock * width);
  float* query_rows = scratch.take(kQueryBlock * size);
  float* scores = scratch.take(kQueryBlock * kScoreStride);
  float* sums = scratch.take(kQueryChunk * width);
  float* row_max = scratch.take(kQueryChunk);
  float* row_sum = scratch.take(kQueryChunk);
  float* factor_buffer = scratch.take(kKeyBlock + 2 * kRandomGroup);
  positions.begin_sequence<Scalar>(scratch, own.length, task.head);

  std::fill(sums, sums + queries * width, 0.0f);
  // The sink is the first score of each row, and its own exponential the first of the sum.
  const float sink = call.sinks ? call.sinks[task.head] : kNegativeInfinity;
  std::fill(row_max, row_max + queries, sink);
  std::fill(row_sum, row_sum + queries, sink == kNegativeInfinity ? 0.0f : 1.0f);

  const KeyRange all = visible(call, task.first_query, task.first_query + queries - 1, 0, key_length);
  for (int64_t first_key = all.begin / kKeyBlock * kKeyBlock; first_key < all.end; first_key += kKeyBlock) {
    const int64_t keys = std::min(kKeyBlock, key_length - first_key);
    const Scalar* k = static_cast<const Scalar*>(call.k) + kv_head * call.k_head;
    const Scalar* v = static_cast<const Scalar*>(call.v) + kv_head * call.v_head;
    load_rows(k, call.k_token, key_start + first_key, keys, call, true, 1.0f, rows);
    pack_columns(rows, size, size, keys, key_panels);
    pack_rows(v + (key_start + first_key) * call.v_token, call.v_token, keys, size, value_panels);
    positions.begin_block(first_key, keys, rows, task.first_query, queries);

    for (int64_t first = 0; first < queries; first += kQueryBlock) {
      const int64_t count = std::min(kQueryBlock, queries - first), query = task.first_query + first;
      KeyRange range = visible(call, query, query + count - 1, first_key, first_key + keys);
      if (range.empty()) continue;
      range.begin -= (range.begin - first_key) % kPanel;  // scores start at a panel
      const int64_t offset = range.begin - first_key, seen = range.end - range.begin;

      load_rows(q, call.q_token, start + query, count, call, true, call.scale, query_rows);
      multiply<false>(count, seen, size, query_rows, size, 1, key_panels + offset * size, kPanel * size, scores, kScoreStride);
      positions.add_scores(query, count, query_rows, range, scores);

      for (int64_t i = 0; i < count; ++i) {
        float* row = scores + i * kScoreStride;
        finish_scores(call, task.head, query + i, range.begin, range.end, row, factor_buffer);  // slopes are not needed here
        float highest = row_max[first + i];
#pragma omp simd reduction(max : highest)
        for (int64_t j = 0; j < seen; ++j) highest = row[j] > highest ? row[j] : highest;
        // A row that sees nothing yet keeps zeros; subtracting its maximum of -inf would make NaN of them.
        const float base = highest == kNegativeInfinity ? 0.0f : highest;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < seen; ++j) {
          const float value = exp_nonpositive(row[j] - base);
          row[j] = value;
          sum += value;
        }
        if (dropout.active()) {
          const uint64_t id = static_cast<uint64_t>((start + query + i) * call.heads + task.head);
          const float* factors = row_factors(dropout, id, range.begin, range.end, factor_buffer);
#pragma omp simd
          for (int64_t j = 0; j < seen; ++j) row[j] *= factors[j];
        }
        const float old = row_max[first + i];
        if (old != highest && old != kNegativeInfinity) {
          const float shrink = exp(old - base);
          row_sum[first + i] *= shrink;
          float* accumulated = sums + (first + i) * width;
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) accumulated[j] *= shrink;
        }
        row_max[first + i] = highest;
        row_sum[first + i] += sum;
      }
      multiply<true>(count, size, seen, scores, kScoreStride, 1, value_panels + offset * kPanel, kPanel * keys,
                     sums + first * width, width);
    }
  }

  Scalar* out = static_cast<Scalar*>(call.out);
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t token = start + task.first_query + i;
    const float sum = row_sum[i];
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // a query that sees no key gives zeros
    Scalar* to = out + (token * call.heads + task.head) * size;
    const float* from = sums + i * width;
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) store(to + j, from[j] * inverse);
    call.lse[token * call.heads + task.head] = sum == 0.0f ? kNegativeInfinity : row_max[i] + std::log(sum);
  }
}

// Keys per part of a key chunk. The gradient of a query is summed part by part.
int64_t keys_per_part(int64_t keys) {
  constexpr int64_t kMostParts = 8;  // each has a gradient of all queries where the parts are different tasks
  int64_t size = kQueryBlock;
  while (size * kMostParts < std::min(keys, kKeyChunk)) size *= 2;
  return size;
}

// Queries of a sequence that may see one of the keys [first, first + count): the window seen from the key's side.
struct QueryRange {
  int64_t begin, end;
};
QueryRange seeing(const stoker_attention_call& call, int64_t queries, int64_t first, int64_t count) {
  const int64_t last = first + count - 1;
  return {(first - std::min(first, call.right)) / kQueryBlock * kQueryBlock,
          call.left >= queries - last ? queries : std::min(queries, last + call.left + 1)};
}

// A key chunk of a sequence that is cut into several tasks for each key/value head, and where they leave what others add up.
struct Cut {
  int64_t ranges;                // of keys, each a task of its own
  int64_t parts;                 // of keys
  float* dq = nullptr;           // (heads, parts, queries, width), or null if there is one range
  float* dkv = nullptr;          // (heads, 2, keys of the chunk, width), or null if no heads share a key/value head
  std::atomic<int32_t>* unfinished = nullptr;  // tasks of each head's dq, then of each key/value head's dk and dv by range
};

// Keys [first_key, last_key) of a chunk of a sequence, and `members` of the heads that share a key/value head, from `member` on.
struct BackwardTask {
  int64_t sequence, kv_head, chunk, first_key, last_key, member, members, work;
  int64_t range = 0;
  const Cut* cut = nullptr;
};

// Sequences whose gradients of the bias or of positions are summed in order, for one key/value head.
struct Group {
  int64_t first, last;  // positions in the list of sequences
  int64_t kv_head, index;
};

template <typename Scalar>
class Backward {
 public:
  Backward(const stoker_attention_call& call, const Dropout& dropout)
      : call_(call), dropout_(dropout), size_(call.head_size), width_(round_up(call.head_size, kPanel)),
        sharing_(call.heads / call.kv_heads), positions_(call, true) {}

  // Empties what the group adds to: its part of the gradients of bias and positions.
  void clear(const Group& group) const {
    positions_.clear_gradients(group.kv_head, group.index);
    if (!call_.dbias) return;
    const int64_t elements = sharing_ * call_.bias_rows * call_.bias_columns;
    float* dbias = call_.dbias + (group.index * call_.kv_heads + group.kv_head) * elements;
    std::fill(dbias, dbias + elements, 0.0f);
  }

  void run(const BackwardTask& task, int64_t group = 0) {
    task_ = task;
    queries_ = span(call_.starts, task.sequence);
    keys_ = span(call_.key_starts, task.sequence);
    kv_head_ = task.kv_head;
    group_ = group;
    part_ = keys_per_part(keys_.length);
    reserve();
    for (int64_t member = task.member; member < task.member + task.members; ++member)
      for (int64_t part = first_part(); part < last_part(); ++part)
        std::fill(dq_of(member, part), dq_of(member, part) + queries_.length * width_, 0.0f);
    for (int64_t first_key = task.first_key; first_key < task.last_key; first_key += kKeyBlock)
      key_block(first_key, std::min(kKeyBlock, task.last_key - first_key));
    positions_.end_sequence(kv_head_, group_);
    finish();
  }

 private:
  void reserve() {
    const int64_t own_dq = shares_dq() ? 0 : task_.members * queries_.length * width_;
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(kKeyBlock * (4 * size_ + 5 * width_) + kQueryBlock * (2 * size_ + 2 * width_ + 2 * kScoreStride + 1) + own_dq +
                    2 * kKeyBlock + 2 * kRandomGroup + 2048 + positions_.floats(queries_.length));
    rows_ = scratch.take(kKeyBlock * size_);
    key_columns_ = scratch.take(kKeyBlock * size_);
    value_columns_ = scratch.take(kKeyBlock * size_);
    key_rows_ = scratch.take(kKeyBlock * width_);
    dk_sums_ = scratch.take(kKeyBlock * width_);
    dv_sums_ = scratch.take(kKeyBlock * width_);
    dk_member_ = scratch.take(kKeyBlock * width_);
    dv_member_ = scratch.take(kKeyBlock * width_);
    query_ = scratch.take(kQueryBlock * size_);
    dout_ = scratch.take(kQueryBlock * size_);
    query_panels_ = scratch.take(kQueryBlock * width_);
    dout_panels_ = scratch.take(kQueryBlock * width_);
    scores_ = scratch.take(kQueryBlock * kScoreStride);
    dscores_ = scratch.take(kQueryBlock * kScoreStride);
    delta_ = scratch.take(kQueryBlock);
    factors_ = scratch.take(kKeyBlock + 2 * kRandomGroup);
    slopes_ = scratch.take(kKeyBlock);
    own_dq_ = scratch.take(own_dq);
    positions_.begin_sequence<Scalar>(scratch, queries_.length, kv_head_);
  }

  bool shares_dq() const { return task_.cut && task_.cut->dq; }
  bool shares_dkv() const { return task_.cut && task_.cut->dkv; }
  int64_t chunk_begin() const { return task_.chunk * kKeyChunk; }
  int64_t chunk_keys() const { return std::min(keys_.length - chunk_begin(), kKeyChunk); }

  // Parts of the chunk that have a sum of their own: those of the task where other tasks have others, else one for all.
  int64_t first_part() const { return shares_dq() ? (task_.first_key - chunk_begin()) / part_ : 0; }
  int64_t last_part() const { return shares_dq() ? (task_.last_key - chunk_begin() + part_ - 1) / part_ : 1; }
  float* dq_of(int64_t member, int64_t part) const {
    if (!shares_dq()) return own_dq_ + (member - task_.member) * queries_.length * width_;
    return task_.cut->dq + ((kv_head_ * sharing_ + member) * task_.cut->parts + part) * queries_.length * width_;
  }
  float* dkv_of(int64_t member, int64_t kind, int64_t key) const {
    return task_.cut->dkv + (((kv_head_ * sharing_ + member) * 2 + kind) * chunk_keys() + key - chunk_begin()) * width_;
  }

  void key_block(int64_t first_key, int64_t keys) {
    const Scalar* k = static_cast<const Scalar*>(call_.k) + kv_head_ * call_.k_head;
    const Scalar* v = static_cast<const Scalar*>(call_.v) + kv_head_ * call_.v_head;
    const int64_t first = keys_.start + first_key;
    load_rows(v, call_.v_token, first, keys, call_, false, 1.0f, rows_);
    pack_columns(rows_, size_, size_, keys, value_columns_);
    load_rows(k, call_.k_token, first, keys, call_, true, 1.0f, rows_);
    pack_columns(rows_, size_, size_, keys, key_columns_);
    pack_rows(rows_, size_, keys, size_, key_rows_);
    const QueryRange range = seeing(call_, queries_.length, first_key, keys);
    for (int64_t member = task_.member; member < task_.member + task_.members; ++member) {
      const bool is_first = member == task_.member;
      dk_ = shares_dkv() ? dkv_of(member, 0, first_key) : is_first ? dk_sums_ : dk_member_;
      dv_ = shares_dkv() ? dkv_of(member, 1, first_key) : is_first ? dv_sums_ : dv_member_;
      std::fill(dk_, dk_ + keys * width_, 0.0f);
      std::fill(dv_, dv_ + keys * width_, 0.0f);
      for (int64_t chunk = range.begin; chunk < range.end; chunk += kQueryChunk) {
        positions_.begin_block(first_key, keys, rows_, chunk, std::min(kQueryChunk, queries_.length - chunk));
        for (int64_t query = chunk; query < std::min(range.end, chunk + kQueryChunk); query += kQueryBlock)
          query_block(member, query, std::min(kQueryBlock, queries_.length - query), first_key, keys);
        positions_.end_block(key_rows_, dk_);
      }
      if (!is_first && !shares_dkv()) {
        add(dk_sums_, dk_, keys * width_);
        add(dv_sums_, dv_, keys * width_);
      }
    }
    if (!shares_dkv()) store_dkv(dk_sums_, dv_sums_, first, keys);
  }

  static void add(float* to, const float* from, int64_t count) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
  }

  void store_dkv(const float* dk, const float* dv, int64_t first, int64_t keys) {
    Scalar* to_k = static_cast<Scalar*>(call_.dk) + kv_head_ * call_.k_head;
    Scalar* to_v = static_cast<Scalar*>(call_.dv) + kv_head_ * call_.v_head;
    store_rows(dk, width_, first, keys, call_, true, 1.0f, to_k, call_.k_token);
    store_rows(dv, width_, first, keys, call_, false, 1.0f, to_v, call_.v_token);
  }

  void query_block(int64_t member, int64_t query, int64_t count, int64_t first_key, int64_t keys) {
    KeyRange range = visible(call_, query, query + count - 1, first_key, first_key + keys);
    if (range.empty()) return;
    range.begin -= (range.begin - first_key) % kPanel;
    const int64_t offset = range.begin - first_key, seen = range.end - range.begin;
    const int64_t head = kv_head_ * sharing_ + member;
    load_queries(head, query, count);

    multiply<false>(count, seen, size_, query_, size_, 1, key_columns_ + offset * size_, kPanel * size_, scores_, kScoreStride);
    positions_.add_scores(query, count, query_, range, scores_);
    multiply<false>(count, seen, size_, dout_, size_, 1, value_columns_ + offset * size_, kPanel * size_, dscores_,
                    kScoreStride);
    for (int64_t i = 0; i < count; ++i) score_gradient(head, query + i, range, scores_ + i * kScoreStride,
                                                       dscores_ + i * kScoreStride, delta_[i]);
    multiply<true>(seen, size_, count, scores_, 1, kScoreStride, dout_panels_, kPanel * count, dv_ + offset * width_, width_);
    multiply<true>(seen, size_, count, dscores_, 1, kScoreStride, query_panels_, kPanel * count, dk_ + offset * width_, width_);
    for (int64_t key = range.begin; key < range.end;) {
      const int64_t part = (key - chunk_begin()) / part_, end = std::min(range.end, chunk_begin() + (part + 1) * part_);
      float* dq = dq_of(member, part) + query * width_;
      multiply<true, true>(count, size_, end - key, dscores_ + key - range.begin, kScoreStride, 1,
                           key_rows_ + (key - first_key) * kPanel, kPanel * keys, dq, width_);
      key = end;
    }
    positions_.take_gradient(query, count, range, dscores_, query_panels_, dq_of(member, 0) + query * width_);
  }

  void load_queries(int64_t head, int64_t query, int64_t count) {
    const int64_t dense = call_.heads * size_, first = queries_.start + query;
    const Scalar* q = static_cast<const Scalar*>(call_.q) + head * call_.q_head;
    const Scalar* dout = static_cast<const Scalar*>(call_.dout) + head * size_;
    const Scalar* out = static_cast<const Scalar*>(call_.out) + head * size_;
    load_rows(q, call_.q_token, first, count, call_, true, call_.scale, query_);  // dK = dS^T (scale * Q) follows
    load_rows(dout, dense, first, count, call_, false, 1.0f, dout_);
    pack_rows(query_, size_, count, size_, query_panels_);
    pack_rows(dout_, size_, count, size_, dout_panels_);
    for (int64_t i = 0; i < count; ++i) delta_[i] = dot(out + (first + i) * dense, dout_ + i * size_, size_);
  }

  // On entry a row of Q K^T and of dO V^T; on exit the dropped-out probabilities and the gradient of the scores.
  void score_gradient(int64_t head, int64_t query, KeyRange range, float* scores, float* dscores, float delta) {
    const int64_t seen = range.end - range.begin, token = queries_.start + query;
    finish_scores(call_, head, query, range.begin, range.end, scores, slopes_);
    const float lse = call_.lse[token * call_.heads + head];
    const float base = lse == kNegativeInfinity ? 0.0f : lse;
    if (dropout_.active()) {
      const float* factors =
          row_factors(dropout_, static_cast<uint64_t>(token * call_.heads + head), range.begin, range.end, factors_);
#pragma omp simd
      for (int64_t j = 0; j < seen; ++j) {
        const float p = exp_nonpositive(scores[j] - base);
        scores[j] = p * factors[j];
        dscores[j] = p * (dscores[j] * factors[j] - delta);
      }
    } else {
#pragma omp simd
      for (int64_t j = 0; j < seen; ++j) {
        const float p = exp_nonpositive(scores[j] - base);
        scores[j] = p;
        dscores[j] = p * (dscores[j] - delta);
      }
    }
    if (call_.dbias) {
      float* dbias = call_.dbias + ((group_ * call_.heads + head) * call_.bias_rows + query) * call_.bias_columns +
                     range.begin;
#pragma omp simd
      for (int64_t j = 0; j < seen; ++j) dbias[j] += dscores[j];
    }
    if (call_.softcap > 0.0f) {
#pragma omp simd
      for (int64_t j = 0; j < seen; ++j) dscores[j] *= slopes_[j];
    }
  }

  // Writes what no other task adds to. Of tasks that share a sum the last one adds the parts up.
  void finish() {
    const auto is_last = [&](int64_t index) { return task_.cut->unfinished[index].fetch_sub(1, std::memory_order_acq_rel) == 1; };
    for (int64_t member = task_.member; member < task_.member + task_.members; ++member) {
      if (shares_dq()) {
        if (!is_last(kv_head_ * sharing_ + member)) continue;
        for (int64_t part = 1; part < task_.cut->parts; ++part)
          add(dq_of(member, 0), dq_of(member, part), queries_.length * width_);
      }
      write_dq(kv_head_ * sharing_ + member, dq_of(member, 0));
    }
    if (!shares_dkv() || !is_last(call_.heads + kv_head_ * task_.cut->ranges + task_.range)) return;
    const int64_t keys = task_.last_key - task_.first_key;
    for (int64_t member = 1; member < sharing_; ++member)
      for (int64_t kind = 0; kind < 2; ++kind)
        add(dkv_of(0, kind, task_.first_key), dkv_of(member, kind, task_.first_key), keys * width_);
    store_dkv(dkv_of(0, 0, task_.first_key), dkv_of(0, 1, task_.first_key), keys_.start + task_.first_key, keys);
  }

  void write_dq(int64_t head, const float* from) {
    if (!queries_.length) return;  // dq and dq_parts may be null where no sequence has a query
    const int64_t dense = call_.heads * size_, tokens = call_.starts[call_.sequences];
    if (keys_.length <= kKeyChunk) {
      Scalar* dq = static_cast<Scalar*>(call_.dq) + head * call_.q_head;
      store_rows(from, width_, queries_.start, queries_.length, call_, true, call_.scale, dq, call_.q_token);
    } else {
      float* part = call_.dq_parts + task_.chunk * tokens * dense + queries_.start * dense + head * size_;
      for (int64_t i = 0; i < queries_.length; ++i) std::copy(from + i * width_, from + i * width_ + size_, part + i * dense);
    }
  }

  const stoker_attention_call& call_;
  const Dropout& dropout_;
  const int64_t size_, width_, sharing_;  // sharing_: how many heads share a key/value head
  RelativePositions positions_;
  BackwardTask task_{};
  Span queries_{}, keys_{};
  int64_t kv_head_ = 0, group_ = 0, part_ = 0;
  float *rows_, *key_columns_, *value_columns_, *key_rows_, *dk_sums_, *dv_sums_, *dk_member_, *dv_member_, *query_, *dout_;
  float *query_panels_, *dout_panels_, *scores_, *dscores_, *delta_, *factors_, *slopes_, *own_dq_;
  float *dk_ = nullptr, *dv_ = nullptr;
};

// At least one: without keys the gradient of the queries is written too, as zeros.
int64_t chunks_of(const stoker_attention_call& call, int64_t sequence) {
  return std::max<int64_t>(1, (span(call.key_starts, sequence).length + kKeyChunk - 1) / kKeyChunk);
}

// Sums the parts that the key chunks of long sequences left, in the order of the chunks.
template <typename Scalar>
void combine_dq(const stoker_attention_call& call) {
  const int64_t dense = call.heads * call.head_size, tokens = call.starts[call.sequences];
  for (int64_t sequence = 0; sequence < call.sequences; ++sequence) {
    const int64_t start = call.starts[sequence], chunks = chunks_of(call, sequence);
    if (chunks == 1) continue;
    parallel_ranges(call.starts[sequence + 1] - start, call.threads, [&](int64_t begin, int64_t end) {
      for (int64_t token = start + begin; token < start + end; ++token) {
        float* row = call.dq_parts + token * dense;
        for (int64_t chunk = 1; chunk < chunks; ++chunk) {
          const float* part = row + chunk * tokens * dense;
#pragma omp simd
          for (int64_t j = 0; j < dense; ++j) row[j] += part[j];
        }
        for (int64_t head = 0; head < call.heads; ++head)
          store_rows(row + head * call.head_size, 0, token, 1, call, true, call.scale,
                     static_cast<Scalar*>(call.dq) + head * call.q_head, call.q_token);
      }
    });
  }
}

// Adds all parts of a gradient to the first, in their order.
void combine_groups(const stoker_attention_call& call, float* parts, int64_t elements) {
  if (!parts || call.groups == 1) return;
  parallel_ranges(elements, threads_for(elements * call.groups, call.threads), [&](int64_t begin, int64_t end) {
    for (int64_t group = 1; group < call.groups; ++group) {
      const float* part = parts + group * elements;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) parts[i] += part[i];
    }
  });
}

// The sink has the probability exp(sink - lse) and no value: its gradient is that of a score whose dO V^T is 0.
template <typename Scalar>
void sink_gradient(const stoker_attention_call& call) {
  constexpr int64_t kTokens = 64;  // a part of the sum
  const int64_t size = call.head_size, tokens = call.starts[call.sequences], parts = (tokens + kTokens - 1) / kTokens;
  const Scalar *out = static_cast<const Scalar*>(call.out), *dout = static_cast<const Scalar*>(call.dout);
  std::vector<double> sums(parts * call.heads, 0.0);
  parallel_ranges(parts, threads_for(tokens * call.heads * size, call.threads), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      for (int64_t token = part * kTokens; token < std::min(tokens, (part + 1) * kTokens); ++token)
        for (int64_t head = 0; head < call.heads; ++head) {
          const int64_t row = token * call.heads + head;
          const float lse = call.lse[row];
          if (lse != kNegativeInfinity)
            sums[part * call.heads + head] -= exp(call.sinks[head] - lse) * dot(out + row * size, dout + row * size, size);
        }
  });
  for (int64_t head = 0; head < call.heads; ++head) {
    double sum = 0.0;
    for (int64_t part = 0; part < parts; ++part) sum += sums[part * call.heads + head];
    call.dsinks[head] = static_cast<float>(sum);
  }
}

// Most work first: the last tasks handed out should be short ones.
template <typename Task>
void sort_by_work(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.work > b.work; });
}

template <typename Scalar>
void forward(const stoker_attention_call& call) {
  const Dropout dropout(call.p, call.key);
  const auto each = [&](auto&& f) {
    for (int64_t s = 0; s < call.sequences; ++s)
      if (span(call.starts, s).length) f(s, span(call.starts, s).length, span(call.key_starts, s).length);
  };
  int64_t work = 0;  // of all heads
  const auto seen = [&](int64_t query, int64_t count, int64_t keys) {
    const KeyRange range = visible(call, query, query + count - 1, 0, keys);
    return range.empty() ? 0 : count * (range.end - range.begin);
  };
  each([&](int64_t, int64_t queries, int64_t keys) {
    for (int64_t query = 0; query < queries; query += kQueryBlock)
      work += call.heads * seen(query, std::min(kQueryBlock, queries - query), keys);
  });
  const int64_t limit = task_limit(work, call.threads);
  std::vector<ForwardTask> tasks;  // of the first head
  each([&](int64_t sequence, int64_t queries, int64_t keys) {
    int64_t chunk = kQueryChunk;
    // Each task would lay the table of positions out again.
    if (!call.position_q && !call.position_k)
      while (chunk > kQueryBlock && seen(std::max<int64_t>(0, queries - chunk), std::min(chunk, queries), keys) > limit)
        chunk -= kQueryBlock;
    for (int64_t query = 0; query < queries; query += chunk) {
      const int64_t count = std::min(chunk, queries - query);
      tasks.push_back({sequence, 0, query, count, seen(query, count, keys)});
    }
  });
  sort_by_work(tasks);
  parallel_tasks(static_cast<int64_t>(tasks.size()) * call.heads, call.threads, [&](int64_t index) {
    ForwardTask task = tasks[index / call.heads];
    task.head = index % call.heads;
    forward_task<Scalar>(call, dropout, task);
  });
}

// How the backward pass is divided, and the memory that its tasks share.
class BackwardPlan {
 public:
  explicit BackwardPlan(const stoker_attention_call& call)
      : call_(call), width_(round_up(call.head_size, kPanel)), sharing_(call.heads / call.kv_heads) {
    int64_t work = 0;
    for_chunks([&](int64_t sequence, int64_t, int64_t first, int64_t last) {
      work += call_.heads * scores(sequence, first, last, keys_per_part(span(call_.key_starts, sequence).length));
    });
    const int64_t limit = task_limit(work, call_.threads);
    int64_t floats = 0, counters = 0;
    for_chunks([&](int64_t sequence, int64_t chunk, int64_t first, int64_t last) {
      ChunkPlan plan = plan_for(sequence, first, last, limit);
      add_tasks(sequence, chunk, first, last, plan);
      floats += plan.dq + plan.dkv;
      counters += plan.counters;
      plans_.push_back(plan);
    });
    share(floats, counters);
    sort_by_work(tasks_);
    for (const BackwardTask& task : tasks_) count_ += call_.heads / task.members;
    by_head_.reserve(count_);
    for (int64_t index = 0; index < static_cast<int64_t>(tasks_.size()); ++index)
      for (int64_t head = 0; head < call_.heads; head += tasks_[index].members) by_head_.push_back({index, head});
  }

  int64_t count() const { return count_; }
  BackwardTask task(int64_t index) const {
    BackwardTask task = tasks_[by_head_[index].task];
    task.kv_head = by_head_[index].head / sharing_;
    task.member = by_head_[index].head % sharing_;
    return task;
  }

 private:
  // How a key chunk of a sequence is divided, and how many floats and counters its tasks share: none if it is not cut.
  struct ChunkPlan {
    int64_t keys_per_task, members, ranges, parts, dq, dkv, counters;
    size_t first_task = 0, last_task = 0;
  };
  struct HeadOfTask {
    int64_t task, head;
  };

  template <typename F>
  void for_chunks(F&& f) const {
    for (int64_t sequence = 0; sequence < call_.sequences; ++sequence) {
      const int64_t keys = span(call_.key_starts, sequence).length;
      if (!keys && !span(call_.starts, sequence).length) continue;
      for (int64_t chunk = 0; chunk < chunks_of(call_, sequence); ++chunk)
        f(sequence, chunk, chunk * kKeyChunk, std::min(keys, (chunk + 1) * kKeyChunk));
    }
  }

  // Scores of one head and the keys [first, last), counted `step` keys at a time.
  int64_t scores(int64_t sequence, int64_t first, int64_t last, int64_t step) const {
    int64_t sum = 0;
    for (int64_t key = first; key < last; key += step) {
      const int64_t count = std::min(step, last - key);
      const QueryRange range = seeing(call_, span(call_.starts, sequence).length, key, count);
      sum += count * std::max<int64_t>(0, range.end - range.begin);
    }
    return sum;
  }

  // First the heads that share keys become tasks of their own, then ranges of keys.
  ChunkPlan plan_for(int64_t sequence, int64_t first, int64_t last, int64_t limit) const {
    const int64_t keys = last - first, queries = span(call_.starts, sequence).length;
    const int64_t part = keys_per_part(span(call_.key_starts, sequence).length);
    const int64_t all = scores(sequence, first, last, part);
    ChunkPlan plan{std::max<int64_t>(keys, 1), sharing_, 1, (keys + part - 1) / part, 0, 0, 0};
    // Positions are laid out for a whole sequence, and their gradients are sums over all keys.
    if (all * sharing_ <= limit || call_.position_q || call_.position_k) return plan;
    plan.members = 1;
    if (sharing_ > 1) plan.dkv = call_.heads * 2 * keys * width_;
    if (all > limit) {
      plan.keys_per_task = part;
      while (plan.keys_per_task < keys && scores(sequence, first, std::min(last, first + plan.keys_per_task + part), part) <= limit)
        plan.keys_per_task += part;
      plan.ranges = (keys + plan.keys_per_task - 1) / plan.keys_per_task;
      if (plan.ranges > 1) plan.dq = call_.heads * plan.parts * queries * width_;
    }
    if (plan.dq || plan.dkv) plan.counters = call_.heads + call_.kv_heads * plan.ranges;
    return plan;
  }

  void add_tasks(int64_t sequence, int64_t chunk, int64_t first, int64_t last, ChunkPlan& plan) {
    const int64_t part = keys_per_part(span(call_.key_starts, sequence).length);
    plan.first_task = tasks_.size();
    for (int64_t range = 0; range < plan.ranges; ++range) {
      const int64_t key = first + range * plan.keys_per_task, end = std::min(last, key + plan.keys_per_task);
      const int64_t work = plan.members * scores(sequence, key, end, part);
      tasks_.push_back({sequence, 0, chunk, key, end, 0, plan.members, work, range, nullptr});
    }
    plan.last_task = tasks_.size();
  }

  void share(int64_t floats, int64_t counters) {
    if (!counters) return;
    memory_ = Buffer<float>(floats);
    unfinished_ = std::make_unique<std::atomic<int32_t>[]>(counters);
    cuts_.reserve(plans_.size());
    float* memory = memory_.get();
    std::atomic<int32_t>* unfinished = unfinished_.get();
    for (const ChunkPlan& plan : plans_) {
      if (!plan.counters) continue;
      cuts_.push_back({plan.ranges, plan.parts, plan.dq ? memory : nullptr, plan.dkv ? memory + plan.dq : nullptr, unfinished});
      for (int64_t i = 0; i < plan.counters; ++i)
        unfinished[i].store(static_cast<int32_t>(i < call_.heads ? plan.ranges : sharing_), std::memory_order_relaxed);
      for (size_t task = plan.first_task; task < plan.last_task; ++task) tasks_[task].cut = &cuts_.back();
      memory += plan.dq + plan.dkv;
      unfinished += plan.counters;
    }
  }

  const stoker_attention_call& call_;
  const int64_t width_, sharing_;
  int64_t count_ = 0;
  std::vector<BackwardTask> tasks_;  // of the first head
  std::vector<HeadOfTask> by_head_;
  std::vector<ChunkPlan> plans_;
  std::vector<Cut> cuts_;
  Buffer<float> memory_;
  std::unique_ptr<std::atomic<int32_t>[]> unfinished_;
};

// The gradients of bias and positions are sums over sequences: each group of sequences adds its own in their order.
template <typename Scalar>
void backward_in_groups(const stoker_attention_call& call, const Dropout& dropout) {
  struct Member {
    int64_t sequence, work;
  };
  std::vector<Member> order;
  for (int64_t s = 0; s < call.sequences; ++s) {
    const int64_t queries = span(call.starts, s).length, keys = span(call.key_starts, s).length;
    if (queries || keys) order.push_back({s, queries * keys});
  }
  sort_by_work(order);
  const int64_t count = static_cast<int64_t>(order.size()), sharing = call.heads / call.kv_heads;
  parallel_tasks(call.groups * call.kv_heads, call.threads, [&](int64_t index) {
    const int64_t number = index / call.kv_heads;
    const Group group{count * number / call.groups, count * (number + 1) / call.groups, index % call.kv_heads, number};
    Backward<Scalar> worker(call, dropout);
    worker.clear(group);
    for (int64_t position = group.first; position < group.last; ++position) {
      const int64_t sequence = order[position].sequence, keys = span(call.key_starts, sequence).length;
      for (int64_t chunk = 0; chunk < chunks_of(call, sequence); ++chunk)
        worker.run({sequence, group.kv_head, chunk, chunk * kKeyChunk, std::min(keys, (chunk + 1) * kKeyChunk), 0, sharing, 0},
                   number);
    }
  });
}

template <typename Scalar>
void backward(const stoker_attention_call& call) {
  const Dropout dropout(call.p, call.key);
  if (call.dbias || call.dposition_q || call.dposition_k) {
    backward_in_groups<Scalar>(call, dropout);
  } else {
    const BackwardPlan plan(call);
    parallel_tasks(plan.count(), call.threads, [&](int64_t index) {
      Backward<Scalar> worker(call, dropout);
      worker.run(plan.task(index));
    });
  }
  if (call.dq_parts) combine_dq<Scalar>(call);
  combine_groups(call, call.dbias, call.heads * call.bias_rows * call.bias_columns);
  combine_groups(call, call.dposition_q, call.position_rows * call.heads * call.head_size);
  combine_groups(call, call.dposition_k, call.position_rows * call.heads * call.head_size);
  if (call.dsinks) sink_gradient<Scalar>(call);
}

}  // namespace
}  // namespace stoker

STOKER_API int64_t stoker_attention_key_chunk() { return stoker::kKeyChunk; }

STOKER_API int32_t stoker_attention_forward(const stoker_attention_call* call) {
  using namespace stoker;
  return guarded([&] { for_dtype(call->dtype, [&](auto* tag) { forward<std::remove_pointer_t<decltype(tag)>>(*call); }); });
}

STOKER_API int32_t stoker_attention_backward(const stoker_attention_call* call) {
  using namespace stoker;
  return guarded([&] { for_dtype(call->dtype, [&](auto* tag) { backward<std::remove_pointer_t<decltype(tag)>>(*call); }); });
}
