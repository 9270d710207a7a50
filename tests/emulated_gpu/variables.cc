// Kernels of resource variables and optimizers. They use TensorFlow's C++ classes, because its
// wheel does not export the C API for variables.

#include <algorithm>
#include <cmath>
#include <memory>

#include "kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace emulated_gpu {
namespace {

using tensorflow::Tensor;
using tensorflow::Var;
using VarPtr = tensorflow::core::RefCountPtr<Var>;

// ---- Variables, by TensorFlow's rules ----
// Reads share the variable's buffer, and a write while a read holds it goes to a copy. After the
// first use of single rows it is the other way round: reads copy, and rows are written in place.

// Gives the variable a buffer of its own with this value. The caller holds the variable's mutex.
void copy_into(Call& call, Var& variable, const Tensor& value) {
  Tensor copy;
  absl::Status status = call.context->allocate_temp(value.dtype(), value.shape(), &copy);
  if (!status.ok()) return call.fail(status);
  call.copy(View(value), View(copy));
  *variable.tensor() = copy;
}

VarPtr find_variable(Call& call, int input) {
  VarPtr variable;
  auto handle = tensorflow::HandleFromInput(call.context, input);
  absl::Status status = tensorflow::LookupResource(call.context, handle, &variable);
  if (!status.ok()) {
    call.fail(absl::FailedPreconditionError("Could not find variable " + handle.name() + ": " +
                                            std::string(status.message())));
  }
  return variable;
}

void let_reads_copy(Call& call, Var& variable) {
  tensorflow::mutex_lock lock(*variable.mu());
  if (variable.copy_on_read_mode.load()) return;
  if (!variable.tensor()->RefCountIsOne()) {
    copy_into(call, variable, Tensor(*variable.tensor()));
  }
  variable.copy_on_read_mode.store(true);
}

enum class Access { WHOLE, ROWS };

// The variables at the inputs 0 … count - 1, locked until the end of the scope.
class Variables {
 public:
  std::vector<View> views;

  Variables(Call& call, int count, Access access) {
    for (int i = 0; i < count; ++i) {
      found_.push_back(find_variable(call, i));
      if (!call.ok()) return;
      if (access == Access::ROWS) let_reads_copy(call, *found_.back());
    }
    lock();
    for (const VarPtr& variable : found_) prepare(call, *variable, access);
  }

 private:
  std::vector<VarPtr> found_;
  std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks_;

  // By address, so that two ops do not wait for each other, and each once.
  void lock() {
    std::vector<tensorflow::mutex*> mutexes;
    for (const VarPtr& variable : found_) mutexes.push_back(variable->mu());
    std::sort(mutexes.begin(), mutexes.end());
    mutexes.erase(std::unique(mutexes.begin(), mutexes.end()), mutexes.end());
    for (auto* mutex : mutexes) locks_.push_back(std::make_unique<tensorflow::mutex_lock>(*mutex));
  }

  void prepare(Call& call, Var& variable, Access access) {
    if (!variable.is_initialized) {
      std::string why = "an uninitialized variable: " + call.def.name();
      return call.fail(absl::FailedPreconditionError(why));
    }
    bool is_shared = variable.copy_on_read_mode.load() || !variable.tensor()->RefCountIsOne();
    if (access == Access::WHOLE && is_shared) {
      copy_into(call, variable, Tensor(*variable.tensor()));
    }
    views.push_back(call.checked(View(*variable.tensor()), false, "a variable"));
  }
};

void assign(Call& call) {
  call.input(1);
  const Tensor& value = call.context->input(1);
  auto create = [&](Var** created) {
    *created = new Var(value.dtype());
    return absl::OkStatus();
  };
  auto handle = tensorflow::HandleFromInput(call.context, 0);
  VarPtr variable;
  absl::Status status =
      tensorflow::LookupOrCreateResource<Var>(call.context, handle, &variable, create);
  if (!status.ok()) return call.fail(status);
  tensorflow::mutex_lock lock(*variable->mu());
  if (variable->copy_on_read_mode.load()) {
    copy_into(call, *variable, value);
  } else {
    *variable->tensor() = value;
  }
  variable->is_initialized = true;
  call.run([] {});
}

struct Add {
  template <class T>
  T operator()(T x, T y) const {
    return T(x + y);
  }
};

struct Subtract {
  template <class T>
  T operator()(T x, T y) const {
    return T(x - y);
  }
};

struct Multiply {
  template <class T>
  T operator()(T x, T y) const {
    return T(x * y);
  }
};

struct Take {
  template <class T>
  T operator()(T, T y) const {
    return y;
  }
};

template <class Op>
void assign_combined(Call& call) {
  View value = call.input(1);
  Variables variables(call, 1, Access::WHOLE);
  if (!call.ok()) return;
  View variable = variables.views[0];
  if (variable.dims != value.dims) return call.fail("the variable has another shape");
  call.run([=] {
    for_number(variable.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t n = 0; n < variable.size; ++n) {
        T& element = variable.as<T>()[n];
        element = Op()(element, value.as<T>()[n]);
      }
    });
  });
}

// ---- Rows of variables ----

void gather(Call& call) {
  View indices = call.input(1);
  Variables variables(call, 1, Access::ROWS);
  if (!call.ok()) return;
  View variable = variables.views[0];
  Dims dims = indices.dims;
  dims.insert(dims.end(), variable.dims.begin() + 1, variable.dims.end());
  View rows = call.output(0, dims);
  int64_t row_bytes = product(variable.dims, 1, variable.dims.size()) * variable.width;
  call.run([=] {
    for (int64_t n = 0; n < indices.size; ++n) {
      int64_t index = integer_at(indices, n);
      char* to = rows.data + n * row_bytes;
      // As on a GPU, an index out of range gives zeros.
      bool exists = index >= 0 && index < variable.dims[0];
      exists ? std::memcpy(to, variable.data + index * row_bytes, row_bytes)
             : std::memset(to, 0, row_bytes);
    }
  });
}

template <class Op>
void scatter(Call& call) {
  View indices = call.input(1);
  View rows = call.input(2);
  Variables variables(call, 1, Access::ROWS);
  if (!call.ok()) return;
  View variable = variables.views[0];
  int64_t row = product(variable.dims, 1, variable.dims.size());
  bool is_scalar = rows.dims.empty();
  call.run([=] {
    for_number(variable.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t n = 0; n < indices.size; ++n) {
        int64_t index = integer_at(indices, n);
        if (index < 0 || index >= variable.dims[0]) continue;  // a GPU drops it
        for (int64_t k = 0; k < row; ++k) {
          T& element = variable.as<T>()[index * row + k];
          element = Op()(element, rows.as<T>()[is_scalar ? 0 : n * row + k]);
        }
      }
    });
  });
}

// ---- Optimizers ----
// A rule updates an element: v are the values of the variables, s the scalars, g the gradient.
// SLOTS counts the variables, which are the first inputs. GRADIENT is the input of the gradient; a
// sparse one has its indices in the next input. The scalars are the inputs that remain, in order.

struct GradientDescent {  // s: learning rate
  static constexpr int SLOTS = 1, GRADIENT = 2;
  explicit GradientDescent(const Call&) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    v[0] -= s[0] * g;
  }
};

struct Momentum {  // v: variable, accumulator; s: learning rate, momentum
  static constexpr int SLOTS = 2, GRADIENT = 3;
  const bool is_nesterov;
  explicit Momentum(const Call& call) : is_nesterov(call.attr<bool>("use_nesterov")) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    v[1] = v[1] * s[1] + g;
    v[0] -= is_nesterov ? g * s[0] + v[1] * s[1] * s[0] : v[1] * s[0];
  }
};

struct KerasMomentum {  // as Momentum, but the accumulator has the learning rate in it
  static constexpr int SLOTS = 2, GRADIENT = 3;
  const bool is_nesterov;
  explicit KerasMomentum(const Call& call) : is_nesterov(call.attr<bool>("use_nesterov")) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    v[1] = v[1] * s[1] - g * s[0];
    v[0] += is_nesterov ? v[1] * s[1] - g * s[0] : v[1];
  }
};

struct Adagrad {  // v: variable, accumulator; s: learning rate
  static constexpr int SLOTS = 2, GRADIENT = 3;
  const bool updates_slots;
  explicit Adagrad(const Call& call) : updates_slots(call.attr<bool>("update_slots")) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    if (updates_slots) v[1] += g * g;
    v[0] -= s[0] * g / std::sqrt(v[1]);
  }
};

struct AdagradV2 {  // s: learning rate, epsilon
  static constexpr int SLOTS = 2, GRADIENT = 4;
  const bool updates_slots;
  explicit AdagradV2(const Call& call) : updates_slots(call.attr<bool>("update_slots")) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    if (updates_slots) v[1] += g * g;
    v[0] -= s[0] * g / (std::sqrt(v[1]) + s[1]);
  }
};

struct Adadelta {  // v: variable, accumulator, accumulated updates; s: learning rate, rho, epsilon
  static constexpr int SLOTS = 3, GRADIENT = 6;
  explicit Adadelta(const Call&) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    v[1] = v[1] * s[1] + g * g * (1.0 - s[1]);
    T update = std::sqrt(v[2] + s[2]) / std::sqrt(v[1] + s[2]) * g;
    v[0] -= update * s[0];
    v[2] = v[2] * s[1] + update * update * (1.0 - s[1]);
  }
};

// v: variable, m, v; s: beta1 power, beta2 power, learning rate, beta1, beta2, epsilon
struct Adam {
  static constexpr int SLOTS = 3, GRADIENT = 9;
  const bool is_nesterov;
  explicit Adam(const Call& call) : is_nesterov(call.attr<bool>("use_nesterov")) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    T rate = s[2] * std::sqrt(1.0 - s[1]) / (1.0 - s[0]);
    v[1] += (g - v[1]) * (1.0 - s[3]);
    v[2] += (g * g - v[2]) * (1.0 - s[4]);
    T direction = is_nesterov ? g * (1.0 - s[3]) + s[3] * v[1] : v[1];
    v[0] -= direction * rate / (std::sqrt(v[2]) + s[5]);
  }
};

struct AdamWithAmsgrad {  // as Adam, with the largest v so far
  static constexpr int SLOTS = 4, GRADIENT = 10;
  explicit AdamWithAmsgrad(const Call&) {}
  void operator()(double* v, const double* s, double g) const {
    double rate = s[2] * std::sqrt(1 - s[1]) / (1 - s[0]);
    v[1] += (g - v[1]) * (1 - s[3]);
    v[2] += (g * g - v[2]) * (1 - s[4]);
    v[3] = std::max(v[2], v[3]);
    v[0] -= v[1] * rate / (std::sqrt(v[3]) + s[5]);
  }
};

struct AdaMax {  // v: variable, m, v; s: beta1 power, learning rate, beta1, beta2, epsilon
  static constexpr int SLOTS = 3, GRADIENT = 8;
  explicit AdaMax(const Call&) {}
  void operator()(double* v, const double* s, double g) const {
    v[1] += (g - v[1]) * (1 - s[2]);
    v[2] = std::max(s[3] * v[2], std::abs(g));
    v[0] -= s[1] / (1 - s[0]) * v[1] / (v[2] + s[4]);
  }
};

struct RmsProp {  // v: variable, mean square, momentum; s: learning rate, rho, momentum, epsilon
  static constexpr int SLOTS = 3, GRADIENT = 7;
  explicit RmsProp(const Call&) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    v[1] += (g * g - v[1]) * (1.0 - s[1]);
    v[2] = v[2] * s[2] + g * s[0] / std::sqrt(v[1] + s[3]);
    v[0] -= v[2];
  }
};

struct CenteredRmsProp {  // v: variable, mean, mean square, momentum; s as RmsProp
  static constexpr int SLOTS = 4, GRADIENT = 8;
  explicit CenteredRmsProp(const Call&) {}
  template <class T>
  void operator()(T* v, const T* s, T g) const {
    v[2] += (g * g - v[2]) * (1.0 - s[1]);
    v[1] += (g - v[1]) * (1.0 - s[1]);
    v[3] = v[3] * s[2] + g * s[0] / std::sqrt(v[2] - v[1] * v[1] + s[3]);
    v[0] -= v[3];
  }
};

// v: variable, accumulator, linear; `shrunk` is the gradient with the shrinkage's part.
void follow_regularized_leader(double* v, double g, double shrunk, double rate, double l1,
                               double l2, double power) {
  double accumulated = v[1] + g * g;
  double scaled = std::pow(accumulated, -power) / rate;
  double scaled_before = std::pow(v[1], -power) / rate;
  v[2] += shrunk - (scaled - scaled_before) * v[0];
  double beyond_l1 = std::copysign(l1, v[2]) - v[2];
  v[0] = std::abs(v[2]) > l1 ? beyond_l1 / (scaled + 2 * l2) : 0;
  v[1] = accumulated;
}

void check_no_linear_rate(const Call& call) {
  CHECK(!call.attr<bool>("multiply_linear_by_lr")) << "not emulated: multiply_linear_by_lr";
}

struct Ftrl {  // s: learning rate, l1, l2, power
  static constexpr int SLOTS = 3, GRADIENT = 3;
  explicit Ftrl(const Call& call) { check_no_linear_rate(call); }
  void operator()(double* v, const double* s, double g) const {
    follow_regularized_leader(v, g, g, s[0], s[1], s[2], s[3]);
  }
};

struct FtrlV2 {  // s: learning rate, l1, l2, l2 shrinkage, power
  static constexpr int SLOTS = 3, GRADIENT = 3;
  explicit FtrlV2(const Call& call) { check_no_linear_rate(call); }
  void operator()(double* v, const double* s, double g) const {
    follow_regularized_leader(v, g, g + 2 * s[3] * v[0], s[0], s[1], s[2], s[4]);
  }
};

// What an optimizer's kernel works on.
struct Update {
  std::vector<View> variables;
  std::vector<View> scalars;  // in the GPU's memory: they are read when the kernel runs
  View gradient;

  // Updates the elements of the variables from `first` on by those of the gradient from `from` on.
  template <class T, class Rule>
  void apply(const Rule& rule, int64_t first, int64_t from, int64_t count) const {
    using W = Long<T>;
    std::vector<W> s;
    for (const View& scalar : scalars) s.push_back(W(scalar.as<T>()[0]));
    W v[Rule::SLOTS];
    for (int64_t n = 0; n < count; ++n) {
      for (int i = 0; i < Rule::SLOTS; ++i) v[i] = W(variables[i].as<T>()[first + n]);
      rule(v, s.data(), W(gradient.as<T>()[from + n]));
      for (int i = 0; i < Rule::SLOTS; ++i) variables[i].as<T>()[first + n] = T(v[i]);
    }
  }
};

// Calls f(T()) for the dtypes that the rule has.
template <class Rule, class F>
void for_rule(DataType type, F f) {
  if constexpr (std::is_invocable_v<Rule, complex128*, const complex128*, complex128>) {
    for_float_or_complex(type, f);
  } else {
    for_float(type, f);
  }
}

template <class Rule>
Update update_of(Call& call, const Variables& variables, bool is_sparse) {
  Update update{variables.views, {}, call.input(Rule::GRADIENT)};
  for (int i = Rule::SLOTS; i < call.context->num_inputs(); ++i) {
    bool is_indices = is_sparse && i == Rule::GRADIENT + 1;
    if (i != Rule::GRADIENT && !is_indices) update.scalars.push_back(call.input(i));
  }
  return update;
}

// A trace of an H100 has 16 to 19 µs for the call of an update, and 12 to 13 for other kernels.
constexpr double LAUNCHES_OF_AN_UPDATE = 1.4;

template <class Rule>
void apply(Call& call) {
  Variables variables(call, Rule::SLOTS, Access::WHOLE);
  if (!call.ok()) return;
  Update update = update_of<Rule>(call, variables, false);
  Rule rule(call);
  int64_t size = update.gradient.size;
  if (update.gradient.dims != update.variables[0].dims) {
    return call.fail("the gradient has another shape than the variable");
  }
  call.cost(LAUNCHES_OF_AN_UPDATE);
  call.run([=] {
    for_rule<Rule>(update.gradient.type, [&](auto zero) {
      update.apply<decltype(zero)>(rule, 0, 0, size);
    });
  });
}

template <class Rule>
void apply_to_rows(Call& call) {
  Variables variables(call, Rule::SLOTS, Access::ROWS);
  if (!call.ok()) return;
  Update update = update_of<Rule>(call, variables, true);
  View indices = call.input(Rule::GRADIENT + 1);
  Rule rule(call);
  const Dims& dims = update.variables[0].dims;
  int64_t rows = dims[0];
  int64_t row = product(dims, 1, dims.size());
  call.run([=] {
    for_rule<Rule>(update.gradient.type, [&](auto zero) {
      for (int64_t n = 0; n < indices.size; ++n) {
        int64_t index = integer_at(indices, n);
        bool exists = index >= 0 && index < rows;
        if (exists) update.apply<decltype(zero)>(rule, index * row, n * row, row);
      }
    });
  });
}

}  // namespace

void add_variable_bodies(Bodies& bodies) {
  bodies.insert({
      {"AssignAddVariableOp", assign_combined<Add>},
      {"AssignSubVariableOp", assign_combined<Subtract>},
      {"AssignVariableOp", assign},

      {"ResourceGather", gather},
      {"ResourceScatterAdd", scatter<Add>},
      {"ResourceScatterMul", scatter<Multiply>},
      {"ResourceScatterSub", scatter<Subtract>},
      {"ResourceScatterUpdate", scatter<Take>},

      {"ResourceApplyAdaMax", apply<AdaMax>},
      {"ResourceApplyAdadelta", apply<Adadelta>},
      {"ResourceApplyAdagrad", apply<Adagrad>},
      {"ResourceApplyAdagradV2", apply<AdagradV2>},
      {"ResourceApplyAdam", apply<Adam>},
      {"ResourceApplyAdamWithAmsgrad", apply<AdamWithAmsgrad>},
      {"ResourceApplyCenteredRMSProp", apply<CenteredRmsProp>},
      {"ResourceApplyFtrl", apply<Ftrl>},
      {"ResourceApplyFtrlV2", apply<FtrlV2>},
      {"ResourceApplyGradientDescent", apply<GradientDescent>},
      {"ResourceApplyKerasMomentum", apply<KerasMomentum>},
      {"ResourceApplyMomentum", apply<Momentum>},
      {"ResourceApplyRMSProp", apply<RmsProp>},

      {"ResourceSparseApplyAdadelta", apply_to_rows<Adadelta>},
      {"ResourceSparseApplyAdagrad", apply_to_rows<Adagrad>},
      {"ResourceSparseApplyAdagradV2", apply_to_rows<AdagradV2>},
      {"ResourceSparseApplyFtrl", apply_to_rows<Ftrl>},
      {"ResourceSparseApplyKerasMomentum", apply_to_rows<KerasMomentum>},
  });
}

}  // namespace emulated_gpu
