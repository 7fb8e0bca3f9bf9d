// Reads the tokens of an attention mask. It has a byte for each position of a batch, and is read once per step: by one thread.
#include "core/parallel.h"

namespace stoker {

namespace {

void count(stoker_mask_call& call) {
  call.tokens = call.longest = call.sequences = call.shifted = call.broken = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    const uint8_t* mask = static_cast<const uint8_t*>(call.mask) + row * call.columns;
    int64_t first = 0, end = call.columns, tokens = 0;
    while (first < end && !mask[first]) ++first;
    while (end > first && !mask[end - 1]) --end;
    for (int64_t column = first; column < end; ++column) tokens += mask[column] != 0;
    call.firsts[row] = tokens ? first : 0;
    call.counts[row] = tokens;
    call.tokens += tokens;
    call.longest = std::max(call.longest, tokens);
    call.sequences += tokens > 0;
    call.shifted += tokens > 0 && first > 0;
    call.broken += tokens != end - first;
  }
}

void fill(const stoker_mask_call& call) {
  int64_t token = 0, sequence = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    if (call.counts[row]) call.starts[sequence++] = token;
    for (int64_t position = 0; position < call.counts[row]; ++position, ++token) {
      call.index[token] = row * call.columns + call.firsts[row] + position;
      call.positions[token] = position;
    }
  }
  call.starts[sequence] = token;
}

}  // namespace
}  // namespace stoker

STOKER_API int32_t stoker_read_mask(stoker_mask_call* call) {
  using namespace stoker;
  return guarded([&] { call->index ? fill(*call) : count(*call); });
}
