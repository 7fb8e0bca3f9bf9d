// Where the memory of torch's tensors and of their gradients lies, for kernels that take all parameters of a model: asking from
// Python costs more than such a kernel's work. Only functions that the caller has found are used, nothing of torch's headers.
#include "core/parallel.h"

namespace stoker {

// An at::Tensor is one pointer, to its c10::TensorImpl, and torch's C interface takes the address of an at::Tensor. So the address
// of any pointer to a TensorImpl serves, without a count of references; the caller keeps the tensor alive.
using Handle = const void* const*;

class TensorFunctions {
 public:
  explicit TensorFunctions(const stoker_tensor_functions& functions) : functions_(functions) {}

  Handle gradient(const void* tensor) const {
    return reinterpret_cast<Handle (*)(const void*)>(functions_.grad)(tensor);
  }

  bool exists(Handle tensor) const { return get<bool>(functions_.is_defined, tensor, false); }

  bool dense(Handle tensor, int32_t dtype) const {
    const int32_t code = dtype == STOKER_BFLOAT16 ? functions_.bfloat16 : functions_.float32;
    // The layout first: a sparse tensor has no answer to the questions after it.
    return get<int32_t>(functions_.layout, tensor, -1) == functions_.strided &&
           get<int32_t>(functions_.device_type, tensor, -1) == functions_.cpu &&
           get<int32_t>(functions_.dtype, tensor, -1) == code && get<bool>(functions_.is_contiguous, tensor, false);
  }

  int64_t size(Handle tensor) const { return get<int64_t>(functions_.numel, tensor, -1); }

  void* address(Handle tensor) const { return get<void*>(functions_.data_ptr, tensor, nullptr); }

  void count_change(Handle tensor) const { reinterpret_cast<void (*)(Handle)>(functions_.bump_version)(tensor); }

 private:
  template <typename T>
  static T get(void* function, Handle tensor, T otherwise) {
    T value = otherwise;
    return reinterpret_cast<int32_t (*)(Handle, T*)>(function)(tensor, &value) == 0 ? value : otherwise;
  }

  const stoker_tensor_functions& functions_;
};

// Fills the results for one tensor; false if it cannot be read.
static bool read_one(const stoker_read_call& call, const TensorFunctions& functions, int64_t index) {
  static char nothing;  // the address of a tensor without elements, which may have none: null says that there is no tensor
  Handle tensor = &call.tensors[index];
  if (call.gradients && *tensor) tensor = functions.gradient(*tensor);
  call.addresses[index] = nullptr;
  call.sizes[index] = 0;
  if (!*tensor || !functions.exists(tensor)) return true;
  if (!functions.dense(tensor, call.dtypes[index])) return false;
  const int64_t size = functions.size(tensor);
  if (size < 0 || (call.expected && size != call.expected[index])) return false;
  call.sizes[index] = size;
  call.addresses[index] = size == 0 ? &nothing : functions.address(tensor);
  return call.addresses[index] != nullptr;
}

}  // namespace stoker

STOKER_API int32_t stoker_read_tensors(stoker_read_call* call) {
  using namespace stoker;
  return guarded([&] {
    const TensorFunctions functions(*call->functions);
    call->found = 0;
    call->unreadable = -1;
    for (int64_t index = 0; index < call->count; ++index) {
      if (!read_one(*call, functions, index)) {
        call->unreadable = index;
        return;
      }
      call->found += call->addresses[index] != nullptr;
    }
  });
}

STOKER_API int32_t stoker_count_changes(const stoker_read_call* call, int32_t gradients) {
  using namespace stoker;
  return guarded([&] {
    const TensorFunctions functions(*call->functions);
    for (int64_t index = 0; index < call->count; ++index) {
      const Handle tensor = &call->tensors[index];
      if (call->addresses[index]) functions.count_change(gradients ? functions.gradient(*tensor) : tensor);
    }
  });
}
