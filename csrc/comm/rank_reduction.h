// Element-wise reduction over several ranks, always in rank order, so that the result does not depend on which rank computes it. 16-bit floats are widened, reduced in fp32 and rounded once.
#pragma once

#include <cstdint>

namespace stoker::comm {

// `type` is a stoker_dtype, `op` a stoker_reduction.
int size_of(int type);                 // in bytes; 0 for a type that does not exist
bool reducible(int type, int op);      // whether the reduction is defined for the type
const char* type_name(int type);
const char* op_name(int op);

// out[i] = op over sources[0..ranks)[i]. `out` may be one of the sources.
void reduce(int type, int op, const void* const* sources, int ranks, void* out, std::int64_t count);

}  // namespace stoker::comm
