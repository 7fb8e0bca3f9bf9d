// AdamW and Adam over all parameters of a model at once. Each thread gets an equal share of all elements, whatever tensors they
// belong to, and the same one in every step: the memory of the state stays near the core that wrote it first.
//
// The arithmetic is that of torch's fused optimizers, rounding included. Their loops are written for vector registers, and finish each
// tensor one element at a time; in torch's builds the compiler has fused other multiplications and additions in the second part. So
// what is fused is written here, and CMakeLists.txt keeps the compiler from fusing more.
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "core/types.h"

namespace stoker {

// torch's: it has no AVX-512 version of these loops.
#if defined(__AVX2__)
constexpr int64_t kRegisterBytes = 32;
#else
constexpr int64_t kRegisterBytes = 16;
#endif

static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// What the elements of one tensor have in common; computed in double, as torch does.
struct Factors {
  float shrink;        // of the parameter, by decoupled weight decay
  float weight_decay;  // added to the gradient, times the parameter
  float sign;          // of the gradient
  float first_weight;  // 1 - beta1
  float beta2, second_weight;
  float root_correction, eps, step_size;
};

struct Update {
  void *parameter, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  const void* gradient;
  int64_t size, offset;  // offset: elements of all tensors before
  int32_t dtype;
  bool amsgrad, adds_decay;
  Factors factors;
};

static Factors factors_of(const stoker_adamw_group& group, float updates) {
  const double step = updates;
  const bool shrinks = group.decoupled && group.weight_decay != 0.0;
  Factors factors;
  factors.shrink = shrinks ? static_cast<float>(1.0 - group.lr * group.weight_decay) : 1.0f;
  factors.weight_decay = static_cast<float>(group.weight_decay);
  factors.sign = group.maximize ? -1.0f : 1.0f;
  factors.first_weight = static_cast<float>(1.0 - group.beta1);
  factors.beta2 = static_cast<float>(group.beta2);
  factors.second_weight = static_cast<float>(1.0 - group.beta2);
  factors.root_correction = static_cast<float>(std::sqrt(1.0 - std::pow(group.beta2, step)));
  factors.eps = static_cast<float>(group.eps);
  factors.step_size = static_cast<float>(group.lr / (1.0 - std::pow(group.beta1, step)));
  return factors;
}

// One element. kVector: as torch's loop over registers, otherwise as the loop after it. kNear: the mean moves by less than half of
// its distance to the gradient, so that it is the better end to start from.
template <bool kVector, bool kNear, bool kAmsgrad, bool kAddsDecay>
static inline void update(const Factors& f, float gradient, float& parameter, float& mean, float& square, float& largest) {
  gradient *= f.sign;
  if (kAddsDecay) gradient = multiply_add(parameter, f.weight_decay, gradient);
  parameter *= f.shrink;
  mean = multiply_add(kNear ? f.first_weight : f.first_weight - 1.0f, gradient - mean, kNear ? mean : gradient);
  const float part = f.second_weight * gradient;
  square = kVector ? multiply_add(part, gradient, square * f.beta2) : multiply_add(square, f.beta2, part * gradient);
  float under_root = square;
  if (kAmsgrad) {
    // NaN stays NaN in the loop over registers, and is ignored after it
    const bool keeps = kVector ? largest > square || largest != largest : !(largest < square);
    under_root = largest = keeps ? largest : square;
  }
  const float root = std::sqrt(under_root) / f.root_correction + f.eps;
  parameter = parameter - f.step_size * mean / root;
}

template <typename T, bool kVector, bool kNear, bool kAmsgrad, bool kAddsDecay>
static void update_range(const Update& u, int64_t begin, int64_t end) {
  const Factors f = u.factors;
  const T* gradients = static_cast<const T*>(u.gradient);
  T* parameters = static_cast<T*>(u.parameter);
  T* means = static_cast<T*>(u.exp_avg);
  T* squares = static_cast<T*>(u.exp_avg_sq);
  T* largests = static_cast<T*>(u.max_exp_avg_sq);
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    float parameter = load(parameters[i]), mean = load(means[i]), square = load(squares[i]);
    float largest = kAmsgrad ? load(largests[i]) : 0.0f;
    update<kVector, kNear, kAmsgrad, kAddsDecay>(f, load(gradients[i]), parameter, mean, square, largest);
    store(&means[i], mean);
    store(&squares[i], square);
    if (kAmsgrad) store(&largests[i], largest);
    store(&parameters[i], parameter);
  }
}

static void update_part(const Update& u, int64_t begin, int64_t end) {
  for_dtype(u.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for_flag(std::fabs(u.factors.first_weight) < 0.5f, [&](auto near) {
      for_flag(u.amsgrad, [&](auto amsgrad) {
        for_flag(u.adds_decay, [&](auto adds_decay) {
          const int64_t tail = std::max(begin, std::min(end, u.size - u.size % (kRegisterBytes / int64_t{sizeof(T)})));
          update_range<T, true, near.value, amsgrad.value, adds_decay.value>(u, begin, tail);
          update_range<T, false, near.value, amsgrad.value, adds_decay.value>(u, tail, end);
        });
      });
    });
  });
}

// Counts the updates and lists the tensors that have a gradient.
static std::vector<Update> updates_of(const stoker_adamw_call& call) {
  std::vector<Update> updates;
  int64_t offset = 0;
  for (int64_t index = 0; index < call.group_count; ++index) {
    const stoker_adamw_group& group = call.groups[index];
    float known = -1.0f;  // the step that `factors` are for: the same for almost all tensors, and powers are slow
    Factors factors{};
    for (int64_t i = group.begin; i < group.end; ++i) {
      if (!call.gradients[i]) continue;
      const float step = *call.steps[i] += 1.0f;
      if (step != known) factors = factors_of(group, known = step);
      void* largest = group.amsgrad ? call.max_exp_avg_sq[i] : nullptr;
      updates.push_back({call.parameters[i], call.exp_avg[i], call.exp_avg_sq[i], largest, call.gradients[i], call.sizes[i],
                         offset, call.dtypes[i], group.amsgrad != 0, !group.decoupled && group.weight_decay != 0.0, factors});
      offset += call.sizes[i];
    }
  }
  return updates;
}

// Where a share that ends at `place` ends inside of a tensor: behind whole cache lines, so that only the end of a tensor is
// computed one element at a time, and no two threads write to one line.
static int64_t inside(const Update& u, int64_t place) {
  constexpr int64_t kLine = 64;
  const int64_t position = (std::max(place - u.offset, int64_t{0}) + kLine - 1) / kLine * kLine;
  return std::min(position, u.size);
}

}  // namespace stoker

STOKER_API int32_t stoker_adamw(const stoker_adamw_call* call) {
  using namespace stoker;
  return guarded([&] {
    const std::vector<Update> updates = updates_of(*call);
    if (updates.empty()) return;
    const int64_t total = updates.back().offset + updates.back().size;
    parallel_ranges(total, threads_for(total, call->threads), [&](int64_t begin, int64_t end) {
      auto first = std::upper_bound(updates.begin(), updates.end(), begin,
                                    [](int64_t place, const Update& u) { return place < u.offset + u.size; });
      for (; first != updates.end() && first->offset < end; ++first) update_part(*first, inside(*first, begin), inside(*first, end));
    });
  });
}
