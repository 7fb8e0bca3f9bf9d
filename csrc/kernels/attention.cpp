// Attention over sequences of different lengths, laid end to end without padding.
//
//   P = softmax(cap(scale * Q K^T) + bias), O = dropout(P) V, one sequence and head at a time.
//
// Scores of relative positions, which are added before the cap, are in kernels/relative_positions.h.
//
// Scores exist only as a block of 64 queries by at most 512 keys in cache. Forward keeps the output and the log of each row's
// sum of exponentials; backward computes the blocks again. Work is cut into tasks by shape alone, and every sum runs in a
// fixed order inside one task, so results do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

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

struct ForwardTask {
  int64_t sequence, head, first_query;
};

template <typename Scalar>
void forward_task(const stoker_attention_call& call, const Dropout& dropout, const ForwardTask& task) {
  const int64_t size = call.head_size, width = round_up(size, kPanel);
  const Span own = span(call.starts, task.sequence), other = span(call.key_starts, task.sequence);
  const int64_t start = own.start, key_start = other.start, key_length = other.length;
  const int64_t queries = std::min(kQueryChunk, own.length - task.first_query);
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

// One key chunk of some sequences and one key/value head. Several sequences share a task only when the bias or the tables of
// positions want a gradient, which sums over them in order.
struct BackwardTask {
  int64_t first, last;  // positions in the list of sequences
  int64_t kv_head, chunk, group;
};

template <typename Scalar>
class Backward {
 public:
  Backward(const stoker_attention_call& call, const Dropout& dropout)
      : call_(call), dropout_(dropout), size_(call.head_size), width_(round_up(call.head_size, kPanel)),
        sharing_(call.heads / call.kv_heads), positions_(call, true) {}

  // Empties what the task adds to: its part of the gradients of bias and positions.
  void clear(const BackwardTask& task) const {
    positions_.clear_gradients(task.kv_head, task.group);
    if (!call_.dbias) return;
    const int64_t elements = sharing_ * call_.bias_rows * call_.bias_columns;
    float* dbias = call_.dbias + (task.group * call_.kv_heads + task.kv_head) * elements;
    std::fill(dbias, dbias + elements, 0.0f);
  }

  void run(int64_t sequence, const BackwardTask& task) {
    queries_ = span(call_.starts, sequence);
    keys_ = span(call_.key_starts, sequence);
    const int64_t chunk_begin = task.chunk * kKeyChunk, chunk_end = std::min(keys_.length, chunk_begin + kKeyChunk);
    kv_head_ = task.kv_head;
    group_ = task.group;
    reserve();
    std::fill(dq_, dq_ + sharing_ * queries_.length * width_, 0.0f);
    for (int64_t first_key = chunk_begin; first_key < chunk_end; first_key += kKeyBlock)
      key_block(first_key, std::min(kKeyBlock, chunk_end - first_key));
    positions_.end_sequence(kv_head_, group_);
    write_dq(task.chunk);
  }

 private:
  void reserve() {
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(kKeyBlock * (4 * size_ + 3 * width_) + kQueryBlock * (2 * size_ + 2 * width_ + 2 * kScoreStride + 1) +
                    sharing_ * queries_.length * width_ + 2 * kKeyBlock + 2 * kRandomGroup + 2048 +
                    positions_.floats(queries_.length));
    rows_ = scratch.take(kKeyBlock * size_);
    key_columns_ = scratch.take(kKeyBlock * size_);
    value_columns_ = scratch.take(kKeyBlock * size_);
    key_rows_ = scratch.take(kKeyBlock * width_);
    dk_ = scratch.take(kKeyBlock * width_);
    dv_ = scratch.take(kKeyBlock * width_);
    query_ = scratch.take(kQueryBlock * size_);
    dout_ = scratch.take(kQueryBlock * size_);
    query_panels_ = scratch.take(kQueryBlock * width_);
    dout_panels_ = scratch.take(kQueryBlock * width_);
    scores_ = scratch.take(kQueryBlock * kScoreStride);
    dscores_ = scratch.take(kQueryBlock * kScoreStride);
    delta_ = scratch.take(kQueryBlock);
    factors_ = scratch.take(kKeyBlock + 2 * kRandomGroup);
    slopes_ = scratch.take(kKeyBlock);
    dq_ = scratch.take(sharing_ * queries_.length * width_);
    positions_.begin_sequence<Scalar>(scratch, queries_.length, kv_head_);
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
    std::fill(dk_, dk_ + keys * width_, 0.0f);
    std::fill(dv_, dv_ + keys * width_, 0.0f);
    // Queries that may see this block: the window seen from the key's side.
    const int64_t last_key = first_key + keys - 1, length = queries_.length;
    const int64_t from = (first_key - std::min(first_key, call_.right)) / kQueryBlock * kQueryBlock;
    const int64_t to = call_.left >= length - last_key ? length : std::min(length, last_key + call_.left + 1);
    for (int64_t member = 0; member < sharing_; ++member)
      for (int64_t chunk = from; chunk < to; chunk += kQueryChunk) {
        positions_.begin_block(first_key, keys, rows_, chunk, std::min(kQueryChunk, length - chunk));
        for (int64_t query = chunk; query < std::min(to, chunk + kQueryChunk); query += kQueryBlock)
          query_block(member, query, std::min(kQueryBlock, length - query), first_key, keys);
        positions_.end_block(key_rows_, dk_);
      }
    Scalar* dk = static_cast<Scalar*>(call_.dk) + kv_head_ * call_.k_head;
    Scalar* dv = static_cast<Scalar*>(call_.dv) + kv_head_ * call_.v_head;
    store_rows(dk_, width_, first, keys, call_, true, 1.0f, dk, call_.k_token);
    store_rows(dv_, width_, first, keys, call_, false, 1.0f, dv, call_.v_token);
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
    float* dq = dq_ + (member * queries_.length + query) * width_;
    multiply<true>(count, size_, seen, dscores_, kScoreStride, 1, key_rows_ + offset * kPanel, kPanel * keys, dq, width_);
    positions_.take_gradient(query, count, range, dscores_, query_panels_, dq);
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

  void write_dq(int64_t chunk) {
    if (!queries_.length) return;  // dq and dq_parts may be null where no sequence has a query
    const int64_t dense = call_.heads * size_, tokens = call_.starts[call_.sequences];
    for (int64_t member = 0; member < sharing_; ++member) {
      const int64_t head = kv_head_ * sharing_ + member;
      const float* from = dq_ + member * queries_.length * width_;
      if (keys_.length <= kKeyChunk) {
        Scalar* dq = static_cast<Scalar*>(call_.dq) + head * call_.q_head;
        store_rows(from, width_, queries_.start, queries_.length, call_, true, call_.scale, dq, call_.q_token);
      } else {
        float* part = call_.dq_parts + chunk * tokens * dense + queries_.start * dense + head * size_;
        for (int64_t i = 0; i < queries_.length; ++i) std::copy(from + i * width_, from + i * width_ + size_, part + i * dense);
      }
    }
  }

  const stoker_attention_call& call_;
  const Dropout& dropout_;
  const int64_t size_, width_, sharing_;  // sharing_: how many heads share a key/value head
  RelativePositions positions_;
  Span queries_{}, keys_{};
  int64_t kv_head_ = 0, group_ = 0;
  float *rows_, *key_columns_, *value_columns_, *key_rows_, *dk_, *dv_, *query_, *dout_, *query_panels_, *dout_panels_;
  float *scores_, *dscores_, *delta_, *factors_, *slopes_, *dq_;
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
  const int64_t size = call.head_size, rows = call.starts[call.sequences] * call.heads;
  const Scalar *out = static_cast<const Scalar*>(call.out), *dout = static_cast<const Scalar*>(call.dout);
  parallel_tasks(call.heads, call.threads, [&](int64_t head) {
    double sum = 0.0;
    for (int64_t row = head; row < rows; row += call.heads) {
      const float lse = call.lse[row];
      if (lse != kNegativeInfinity) sum -= exp(call.sinks[head] - lse) * dot(out + row * size, dout + row * size, size);
    }
    call.dsinks[head] = static_cast<float>(sum);
  });
}

// Most work first: the last tasks handed out should be short ones.
std::vector<int64_t> by_work(const stoker_attention_call& call) {
  const auto work = [&](int64_t s) { return span(call.starts, s).length * span(call.key_starts, s).length; };
  std::vector<int64_t> order;
  for (int64_t s = 0; s < call.sequences; ++s)
    if (span(call.starts, s).length || span(call.key_starts, s).length) order.push_back(s);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return work(a) > work(b); });
  return order;
}

template <typename Scalar>
void forward(const stoker_attention_call& call) {
  const Dropout dropout(call.p, call.key);
  std::vector<ForwardTask> tasks;
  for (int64_t sequence : by_work(call)) {
    const int64_t length = span(call.starts, sequence).length;
    for (int64_t head = 0; head < call.heads; ++head)
      for (int64_t query = 0; query < length; query += kQueryChunk) tasks.push_back({sequence, head, query});
  }
  parallel_tasks(static_cast<int64_t>(tasks.size()), call.threads,
                 [&](int64_t index) { forward_task<Scalar>(call, dropout, tasks[index]); });
}

template <typename Scalar>
void backward(const stoker_attention_call& call) {
  const Dropout dropout(call.p, call.key);
  const std::vector<int64_t> order = by_work(call);
  const int64_t count = static_cast<int64_t>(order.size());
  std::vector<BackwardTask> tasks;
  if (call.dbias || call.dposition_q || call.dposition_k) {
    for (int64_t group = 0; group < call.groups; ++group)
      for (int64_t head = 0; head < call.kv_heads; ++head)
        tasks.push_back({count * group / call.groups, count * (group + 1) / call.groups, head, -1, group});
  } else {
    for (int64_t position = 0; position < count; ++position)
      for (int64_t head = 0; head < call.kv_heads; ++head)
        for (int64_t chunk = 0; chunk < chunks_of(call, order[position]); ++chunk)
          tasks.push_back({position, position + 1, head, chunk, 0});
  }
  parallel_tasks(static_cast<int64_t>(tasks.size()), call.threads, [&](int64_t index) {
    BackwardTask task = tasks[index];
    Backward<Scalar> worker(call, dropout);
    if (task.chunk < 0) worker.clear(task);
    for (int64_t position = task.first; position < task.last; ++position) {
      const int64_t sequence = order[position];
      if (task.chunk >= 0) {
        worker.run(sequence, task);
        continue;
      }
      const int64_t chunks = chunks_of(call, sequence);
      for (BackwardTask piece = {0, 0, task.kv_head, 0, task.group}; piece.chunk < chunks; ++piece.chunk)
        worker.run(sequence, piece);
    }
  });
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
