// Kernels of arrays, TensorFlow's registration of all kernels, and what a call of a kernel does.
// registrations.inc tells the dtypes and the arguments in host memory.

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <random>

#include "kernel.h"

namespace emulated_gpu {

// ---- A call ----

namespace {

bool has_only_host_memory(tensorflow::OpKernelContext* context) {
  for (int i = 0; i < context->num_inputs(); ++i) {
    if (context->input_memory_type(i) != tensorflow::HOST_MEMORY) return false;
  }
  for (int i = 0; i < context->num_outputs(); ++i) {
    if (context->output_memory_type(i) != tensorflow::HOST_MEMORY) return false;
  }
  return context->num_outputs() > 0;
}

SP_Stream stream_of(TF_OpKernelContext* context) {
  TF_Status* status = TF_NewStatus();
  SP_Stream stream = TF_GetStream(context, status);
  TF_DeleteStatus(status);
  return stream;
}

}  // namespace

Call::Call(TF_OpKernelContext* c_context, Kernel& kernel)
    : context(reinterpret_cast<tensorflow::OpKernelContext*>(c_context)),
      def(kernel.def),
      number(kernel.calls++),
      stream_(stream_of(c_context)),
      device_(device_of_stream(stream_)),
      computes_on_host_(has_only_host_memory(context)) {}

void Call::fail(const std::string& why) {
  fail(absl::InvalidArgumentError(def.op() + " " + def.name() + ": " + why));
}

View Call::checked(View view, bool is_on_host, const char* what) {
  if (view.size == 0 || computes_on_host_) return view;
  int wanted = is_on_host ? HOST : device_;
  int found = device_of_memory(view.data);
  if (found == wanted) return view;
  std::string where = found == HOST ? "host memory" : "another GPU's memory";
  std::string fault = def.op() + ": " + what + " in " + where;
  count_fault(fault);
  fail(absl::InternalError("an illegal memory access: " + fault + ", " + def.name()));
  return view;
}

View Call::input(int i) {
  bool is_on_host = context->input_memory_type(i) == tensorflow::HOST_MEMORY;
  return checked(View(context->input(i)), is_on_host, "an input");
}

View Call::output(int i, const Dims& dims, const std::vector<int>& reuse) {
  tensorflow::TensorShape shape;
  for (int64_t dim : dims) shape.AddDim(dim);
  tensorflow::Tensor* tensor = nullptr;
  int reused = -1;
  absl::Status status =
      context->forward_input_or_allocate_output(reuse, i, shape, &tensor, &reused);
  if (!status.ok()) {
    fail(status);
    return View();
  }
  bool is_on_host = context->output_memory_type(i) == tensorflow::HOST_MEMORY;
  View view = checked(View(*tensor), is_on_host, "an output");
  if (reused < 0) unwritten_.push_back(view);
  return view;
}

Dims Call::host_integers(int i) {
  View view = input(i);
  Dims values(view.size);
  for (int64_t n = 0; n < view.size; ++n) values[n] = integer_at(view, n);
  return values;
}

int Call::axis(int64_t axis, size_t rank) {
  bool exists = -int64_t(rank) <= axis && axis < int64_t(rank);
  if (!exists) fail("there is no axis " + std::to_string(axis));
  return axis < 0 ? axis + rank : axis;
}

void Call::run(Work work) {
  if (!ok()) return;
  count_kernel(computes_on_host_ ? HOST : device_, def.op());
  if (computes_on_host_) return work();
  if (is_timed()) {
    static const double host_seconds = number_option("HOST_US", 0) * 1e-6;
    bool is_of_the_model = def.op() == "Maximum" && absl::StrContains(def.name(), "_burn_");
    if (host_seconds > 0 && is_of_the_model) keep_host_busy(host_seconds);
    return queue_kernel_time(stream_, seconds(), def.op() + " " + def.name());
  }
  // TensorFlow's allocator hands memory out again, with an old value that may look right: so an
  // output is NaN from the kernel's turn on until the kernel has run.
  auto poison = [outputs = std::move(unwritten_)] {
    for (const View& output : outputs) std::memset(output.data, 0xFF, output.bytes);
  };
  unwritten_.clear();
  enqueue(stream_, poison, std::move(work));
}

void Call::copy(const View& from, const View& to) {
  if (is_timed()) return;
  enqueue(stream_, nullptr, [=] { std::memcpy(to.data, from.data, from.bytes); });
}

// Of a kernel in timed mode: `…burn_270.5…` in its name says 270.5 µs. Others take the time of a
// launch and of their bytes.
double Call::seconds() const {
  size_t at = def.name().find("burn_");
  if (at != std::string::npos) return std::atof(def.name().c_str() + at + 5) * 1e-6;
  double bytes = 0;
  for (int i = 0; i < context->num_inputs(); ++i) {
    if (context->input_memory_type(i) == tensorflow::HOST_MEMORY) continue;
    bytes += context->input(i).TotalBytes();
  }
  for (int i = 0; i < context->num_outputs(); ++i) {
    bool is_on_host = context->output_memory_type(i) == tensorflow::HOST_MEMORY;
    const tensorflow::Tensor* output = context->mutable_output(i);
    if (output && !is_on_host) bytes += output->TotalBytes();
  }
  static const double launch = number_option("KERNEL_US", 8) * 1e-6;
  static const double bytes_per_second = number_option("MEMORY_GBS", 700) * 1e9;
  return launch + bytes / bytes_per_second;
}

namespace {

// ---- Walks over arrays: broadcasting, reductions, slices and transposes are all such walks ----

Dims strides_of(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (int d = int(dims.size()) - 2; d >= 0; --d) strides[d] = strides[d + 1] * dims[d + 1];
  return strides;
}

// The strides of an array of `dims` that is broadcast to `wider`.
Dims broadcast_strides(const Dims& dims, const Dims& wider) {
  Dims own = strides_of(dims);
  Dims strides(wider.size(), 0);
  size_t added = wider.size() - dims.size();
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] != 1) strides[added + d] = own[d];
  }
  return strides;
}

// Calls f(n, x, y) for each of `dims`' elements, in order: its number, and its two places by the two
// lists of strides.
template <class F>
void walk(const Dims& dims, const Dims& x_strides, const Dims& y_strides, F f) {
  Dims at(dims.size());
  int64_t x = 0;
  int64_t y = 0;
  int64_t count = product(dims);
  for (int64_t n = 0; n < count; ++n) {
    f(n, x, y);
    for (int d = int(dims.size()) - 1; d >= 0; --d) {
      x += x_strides[d];
      y += y_strides[d];
      if (++at[d] < dims[d]) break;
      x -= x_strides[d] * dims[d];
      y -= y_strides[d] * dims[d];
      at[d] = 0;
    }
  }
}

// The shape that x and y are broadcast to. Fails if there is none.
Dims broadcast(Call& call, const Dims& x, const Dims& y) {
  Dims wider(std::max(x.size(), y.size()), 1);
  for (const Dims* dims : {&x, &y}) {
    size_t added = wider.size() - dims->size();
    for (size_t d = 0; d < dims->size(); ++d) {
      int64_t dim = (*dims)[d];
      int64_t& wide = wider[added + d];
      if (dim != wide && dim != 1 && wide != 1) call.fail("the shapes do not fit");
      if (dim != 1) wide = dim;
    }
  }
  return wider;
}

// One side of a move: an array, the strides of the walk there, and the first element.
struct Side {
  View view;
  Dims strides;
  int64_t first = 0;
};

void move(Call& call, const Dims& dims, const Side& from, const Side& to) {
  call.run([=] {
    const size_t width = from.view.width;
    const char* source = from.view.data + from.first * width;
    char* target = to.view.data + to.first * width;
    walk(dims, from.strides, to.strides, [&](int64_t, int64_t x, int64_t y) {
      std::memcpy(target + y * width, source + x * width, width);
    });
  });
}

// ---- Ops of each element ----

template <class Op>
void unary(Call& call) {
  View x = call.input(0);
  View y = call.output(0, x.dims, {0});
  call.run([=] {
    for_number(x.type, [&](auto zero) {
      using T = decltype(zero);
      using W = Wide<T>;
      if constexpr (std::is_invocable_v<Op, W>) {
        for (int64_t n = 0; n < x.size; ++n) y.as<T>()[n] = T(Op()(W(x.as<T>()[n])));
      }
    });
  });
}

// An op from floats, or from bool, to bool.
template <class Op>
void test(Call& call) {
  View x = call.input(0);
  View y = call.output(0, x.dims);
  call.run([=] {
    for_real(x.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t n = 0; n < x.size; ++n) y.as<bool>()[n] = Op()(Wide<T>(x.as<T>()[n]));
    });
  });
}

template <class Op, class Out, class T>
void combine(const View& x, const View& y, const View& z) {
  auto op = [](T a, T b) { return Out(Op()(Wide<T>(a), Wide<T>(b))); };
  const T* a = x.as<T>();
  const T* b = y.as<T>();
  Out* out = z.as<Out>();
  if (x.dims == y.dims) {
    for (int64_t n = 0; n < z.size; ++n) out[n] = op(a[n], b[n]);
    return;
  }
  Dims x_strides = broadcast_strides(x.dims, z.dims);
  Dims y_strides = broadcast_strides(y.dims, z.dims);
  walk(z.dims, x_strides, y_strides,
       [&](int64_t n, int64_t i, int64_t j) { out[n] = op(a[i], b[j]); });
}

template <class Op, bool is_comparison = false>
void binary(Call& call) {
  View x = call.input(0);
  View y = call.input(1);
  Dims dims = broadcast(call, x.dims, y.dims);
  if (!call.ok()) return;
  std::vector<int> reuse;
  if (!is_comparison) reuse = {0, 1};
  View z = call.output(0, dims, reuse);
  call.run([=] {
    for_number(x.type, [&](auto zero) {
      using T = decltype(zero);
      using Out = std::conditional_t<is_comparison, bool, T>;
      if constexpr (std::is_invocable_v<Op, Wide<T>, Wide<T>>) combine<Op, Out, T>(x, y, z);
    });
  });
}
template <class Op>
void compare(Call& call) {
  binary<Op, true>(call);
}

// A real op exists for no complex dtype, and its template is not instantiated for one.
#define IF_REAL(T) std::enable_if_t<!is_complex<T>, int> = 0
#define UNARY(NAME, ...)         \
  struct NAME {                  \
    template <class T>           \
    T operator()(T x) const {    \
      return T(__VA_ARGS__);     \
    }                            \
  }
#define REAL_UNARY(NAME, ...)        \
  struct NAME {                      \
    template <class T, IF_REAL(T)>   \
    T operator()(T x) const {        \
      return T(__VA_ARGS__);         \
    }                                \
  }
#define BINARY(NAME, ...)            \
  struct NAME {                      \
    template <class T>               \
    T operator()(T x, T y) const {   \
      return T(__VA_ARGS__);         \
    }                                \
  }
#define REAL_BINARY(NAME, ...)       \
  struct NAME {                      \
    template <class T, IF_REAL(T)>   \
    T operator()(T x, T y) const {   \
      return T(__VA_ARGS__);         \
    }                                \
  }
#define TEST(NAME, ...)              \
  struct NAME {                      \
    template <class T>               \
    bool operator()(T x) const {     \
      return __VA_ARGS__;            \
    }                                \
  }
#define COMPARISON(NAME, ...)          \
  struct NAME {                        \
    template <class T>                 \
    bool operator()(T x, T y) const {  \
      return __VA_ARGS__;              \
    }                                  \
  }
#define REAL_COMPARISON(NAME, ...)     \
  struct NAME {                        \
    template <class T, IF_REAL(T)>     \
    bool operator()(T x, T y) const {  \
      return __VA_ARGS__;              \
    }                                  \
  }

UNARY(Zero, 0);
UNARY(One, 1);
UNARY(Negative, -x);
UNARY(Square, x* x);
UNARY(Reciprocal, T(1) / x);
UNARY(Exp, std::exp(x));
REAL_UNARY(SquareRoot, std::sqrt(x));
REAL_UNARY(InverseRoot, 1 / std::sqrt(x));
REAL_UNARY(Log, std::log(x));
REAL_UNARY(Tanh, std::tanh(x));
REAL_UNARY(Sigmoid, 1 / (1 + std::exp(-x)));
REAL_UNARY(Floor, std::floor(x));
REAL_UNARY(Absolute, x < T(0) ? T(-x) : x);
REAL_UNARY(Relu, x > T(0) ? x : T(0));

struct Sign {
  template <class T>
  T operator()(T x) const {
    if constexpr (is_complex<T>) return x == T(0) ? x : x / std::abs(x);
    else return T((x > T(0)) - (x < T(0)));
  }
};

TEST(IsFinite, std::isfinite(double(x)));
TEST(IsNan, std::isnan(double(x)));
TEST(IsInf, std::isinf(double(x)));
TEST(Not, !x);

BINARY(Add, x + y);
BINARY(Subtract, x - y);
BINARY(Multiply, x* y);
BINARY(Divide, y == T(0) && std::is_integral_v<T> ? T(0) : x / y);
BINARY(DivideNoNan, y == T(0) ? T(0) : x / y);
REAL_BINARY(Maximum, x > y ? x : y);
REAL_BINARY(Minimum, x < y ? x : y);
REAL_BINARY(Power, std::pow(x, y));
REAL_BINARY(SquaredDifference, (x - y) * (x - y));
REAL_BINARY(ReluGrad, y > T(0) ? x : T(0));
REAL_BINARY(TanhGrad, y*(1 - x * x));
REAL_BINARY(SigmoidGrad, y* x*(1 - x));

COMPARISON(Equal, x == y);
COMPARISON(NotEqual, x != y);
REAL_COMPARISON(Greater, x > y);
REAL_COMPARISON(GreaterEqual, x >= y);
REAL_COMPARISON(Less, x < y);
REAL_COMPARISON(LessEqual, x <= y);
REAL_COMPARISON(And, x&& y);
REAL_COMPARISON(Or, x || y);

template <class From, class To>
To cast_value(From value) {
  if constexpr (is_complex<From> && is_complex<To>) {
    return To(value.real(), value.imag());
  } else if constexpr (is_complex<From>) {
    return cast_value<typename From::value_type, To>(value.real());
  } else if constexpr (is_complex<To>) {
    using Part = typename To::value_type;
    return To(Part(Wide<From>(value)), Part(0));
  } else {
    return To(Wide<To>(Wide<From>(value)));
  }
}

void cast(Call& call) {
  View x = call.input(0);
  View y = call.output(0, x.dims);
  call.run([=] {
    for_number(x.type, [&](auto x_zero) {
      for_number(y.type, [&](auto y_zero) {
        using From = decltype(x_zero);
        using To = decltype(y_zero);
        for (int64_t n = 0; n < x.size; ++n) y.as<To>()[n] = cast_value<From, To>(x.as<From>()[n]);
      });
    });
  });
}

// The inputs from number `first` on.
std::vector<View> inputs(Call& call, int first, int count) {
  std::vector<View> views;
  for (int i = 0; i < count; ++i) views.push_back(call.input(first + i));
  return views;
}

void add_n(Call& call) {
  std::vector<View> terms = inputs(call, 0, call.context->num_inputs());
  std::vector<int> reuse;
  for (size_t i = 0; i < terms.size(); ++i) {
    if (terms[i].dims != terms[0].dims) return call.fail("all inputs need the same shape");
    reuse.push_back(i);
  }
  View sum = call.output(0, terms[0].dims, reuse);
  call.run([=] {
    for_number(sum.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t n = 0; n < sum.size; ++n) {
        T total = terms[0].as<T>()[n];
        for (size_t i = 1; i < terms.size(); ++i) total = T(total + terms[i].as<T>()[n]);
        sum.as<T>()[n] = total;
      }
    });
  });
}

void select(Call& call) {
  View condition = call.input(0);
  View x = call.input(1);
  View y = call.input(2);
  Dims dims = broadcast(call, broadcast(call, x.dims, y.dims), condition.dims);
  bool is_by_rows = call.def.op() == "Select" && condition.dims.size() == 1 && dims.size() > 1;
  if (is_by_rows) call.fail("not emulated: a condition for each row");
  if (!call.ok()) return;
  View z = call.output(0, dims);
  call.run([=] {
    std::vector<char> takes_x(z.size);
    Dims strides = broadcast_strides(condition.dims, dims);
    walk(dims, strides, strides,
         [&](int64_t n, int64_t i, int64_t) { takes_x[n] = condition.data[i]; });
    walk(dims, broadcast_strides(x.dims, dims), broadcast_strides(y.dims, dims),
         [&](int64_t n, int64_t i, int64_t j) {
           const char* from = takes_x[n] ? x.data + i * z.width : y.data + j * z.width;
           std::memcpy(z.data + n * z.width, from, z.width);
         });
  });
}

// ---- Reductions ----

// Where a reduction's values go: the strides of its input in the output, and the output's shape.
struct Reduced {
  Dims strides;
  Dims shape;
};

Reduced reduced(Call& call, const Dims& dims) {
  std::vector<char> is_gone(dims.size(), 0);
  for (int64_t axis : call.host_integers(1)) is_gone.at(call.axis(axis, dims.size())) = 1;
  Dims kept;
  for (size_t d = 0; d < dims.size(); ++d) kept.push_back(is_gone[d] ? 1 : dims[d]);
  Reduced result{strides_of(kept), {}};
  bool keeps_dims = call.attr<bool>("keep_dims");
  for (size_t d = 0; d < dims.size(); ++d) {
    if (is_gone[d]) result.strides[d] = 0;
    if (!is_gone[d] || keeps_dims) result.shape.push_back(kept[d]);
  }
  return result;
}

enum class Start { ZERO, ONE, LOWEST, HIGHEST };

template <class T>
Long<T> start_value(Start start) {
  if constexpr (!is_complex<T>) {
    if (start == Start::LOWEST) return Long<T>(Wide<T>(std::numeric_limits<T>::lowest()));
    if (start == Start::HIGHEST) return Long<T>(Wide<T>(std::numeric_limits<T>::max()));
  }
  return Long<T>(start == Start::ONE ? 1 : 0);
}

template <class Op, Start start, bool is_mean = false>
void reduce(Call& call) {
  View x = call.input(0);
  Reduced to = reduced(call, x.dims);
  if (!call.ok()) return;
  View y = call.output(0, to.shape);
  call.run([=] {
    for_number(x.type, [&](auto zero) {
      using T = decltype(zero);
      using Total = Long<T>;
      if constexpr (std::is_invocable_v<Op, Total, Total>) {
        // A vector of bool has no elements that can be referred to: its deque has.
        std::deque<Total> totals(y.size, start_value<T>(start));
        walk(x.dims, to.strides, to.strides, [&](int64_t n, int64_t i, int64_t) {
          totals[i] = Op()(totals[i], cast_value<T, Total>(x.as<T>()[n]));
        });
        double count = y.size ? double(x.size) / y.size : 1;
        for (int64_t i = 0; i < y.size; ++i) {
          Total total = is_mean ? totals[i] / Total(count) : totals[i];
          y.as<T>()[i] = cast_value<Total, T>(total);
        }
      }
    });
  });
}

void l2_loss(Call& call) {
  View x = call.input(0);
  View y = call.output(0, {});
  call.run([=] {
    for_float(x.type, [&](auto zero) {
      using T = decltype(zero);
      double total = 0;
      for (int64_t n = 0; n < x.size; ++n) {
        double value(x.as<T>()[n]);
        total += value * value / 2;
      }
      y.as<T>()[0] = T(total);
    });
  });
}

// ---- Shapes ----

// Cuts a whole along an axis into parts, or joins them: both copy strips of bytes.
struct Strips {
  View whole;
  std::vector<View> parts;
  int64_t count;  // strips of a part

  template <class F>
  void for_each(F f) const {  // f(a strip in the whole, the same in the part, its bytes)
    if (whole.size == 0) return;
    int64_t stride = whole.bytes / count;
    int64_t first = 0;
    for (const View& part : parts) {
      int64_t bytes = part.bytes / count;
      for (int64_t n = 0; n < count; ++n) {
        f(whole.data + n * stride + first, part.data + n * bytes, bytes);
      }
      first += bytes;
    }
  }
};

void join(Call& call, const std::vector<View>& parts, int axis, const Dims& dims) {
  View whole = call.output(0, dims);
  Strips strips{whole, parts, product(dims, 0, axis)};
  call.run([=] {
    strips.for_each([](char* whole, char* part, int64_t bytes) {
      if (bytes) std::memcpy(whole, part, bytes);
    });
  });
}

void cut(Call& call, const View& whole, int axis, const std::vector<Dims>& shapes) {
  Strips strips{whole, {}, product(whole.dims, 0, axis)};
  for (const Dims& shape : shapes) strips.parts.push_back(call.output(strips.parts.size(), shape));
  call.run([=] {
    strips.for_each([](char* whole, char* part, int64_t bytes) {
      if (bytes) std::memcpy(part, whole, bytes);
    });
  });
}

void concat_along(Call& call, const std::vector<View>& parts, int64_t any_axis) {
  Dims dims = parts[0].dims;
  int axis = call.axis(any_axis, dims.size());
  if (!call.ok()) return;
  dims[axis] = 0;
  for (const View& part : parts) {
    Dims others = part.dims;
    if (others.size() == dims.size()) others[axis] = dims[axis];
    if (others != dims) return call.fail("the dimensions of the inputs should match");
    dims[axis] += part.dims[axis];
  }
  join(call, parts, axis, dims);
}

void concat(Call& call) {
  int count = call.attr<int32_t>("N");
  concat_along(call, inputs(call, 1, count), call.host_integer(0));
}

void concat_v2(Call& call) {
  int count = call.attr<int32_t>("N");
  concat_along(call, inputs(call, 0, count), call.host_integer(count));
}

void pack(Call& call) {
  std::vector<View> parts = inputs(call, 0, call.context->num_inputs());
  Dims dims = parts[0].dims;
  int axis = call.axis(call.attr<int32_t>("axis"), dims.size() + 1);
  if (!call.ok()) return;
  dims.insert(dims.begin() + axis, parts.size());
  join(call, parts, axis, dims);
}

void unpack(Call& call) {
  View x = call.input(0);
  int axis = call.axis(call.attr<int32_t>("axis"), x.dims.size());
  if (!call.ok()) return;
  Dims shape = x.dims;
  shape.erase(shape.begin() + axis);
  cut(call, x, axis, std::vector<Dims>(x.dims[axis], shape));
}

void split_into(Call& call, const View& x, int axis, const Dims& sizes) {
  std::vector<Dims> shapes(sizes.size(), x.dims);
  for (size_t i = 0; i < sizes.size(); ++i) shapes[i][axis] = sizes[i];
  cut(call, x, axis, shapes);
}

void split(Call& call) {
  View x = call.input(1);
  int axis = call.axis(call.host_integer(0), x.dims.size());
  int count = call.attr<int32_t>("num_split");
  if (!call.ok()) return;
  if (x.dims[axis] % count) return call.fail("the dimension does not divide");
  split_into(call, x, axis, Dims(count, x.dims[axis] / count));
}

void split_v(Call& call) {
  View x = call.input(0);
  Dims sizes = call.host_integers(1);
  int axis = call.axis(call.host_integer(2), x.dims.size());
  if (!call.ok()) return;
  int64_t rest = x.dims[axis];
  for (int64_t size : sizes) rest -= std::max<int64_t>(size, 0);
  auto open = std::find(sizes.begin(), sizes.end(), -1);
  if (open != sizes.end()) {
    *open = rest;
    rest = 0;
  }
  if (rest) return call.fail("the sizes do not add up");
  split_into(call, x, axis, sizes);
}

void slice(Call& call) {
  View x = call.input(0);
  Dims begin = call.host_integers(1);
  Dims sizes = call.host_integers(2);
  Dims strides = strides_of(x.dims);
  int64_t first = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 0) sizes[d] = x.dims[d] - begin[d];
    bool fits = begin[d] >= 0 && begin[d] + sizes[d] <= x.dims[d];
    if (!fits) return call.fail("the slice is out of range");
    first += begin[d] * strides[d];
  }
  View y = call.output(0, sizes);
  move(call, sizes, {x, strides, first}, {y, strides_of(sizes)});
}

// What a strided slice reads of an array, or its gradient writes.
struct StridedSlice {
  Dims shape;    // of the slice
  Dims walked;   // the shape without new axes of size 1
  Dims strides;  // of `walked` in the array
  int64_t first = 0;
};

// A bit of each mask tells whether the entry of the same number is … (see tf.strided_slice).
struct SliceMasks {
  explicit SliceMasks(const Call& call)
      : begin(call.attr<int32_t>("begin_mask")),
        end(call.attr<int32_t>("end_mask")),
        ellipsis(call.attr<int32_t>("ellipsis_mask")),
        new_axis(call.attr<int32_t>("new_axis_mask")),
        shrink(call.attr<int32_t>("shrink_axis_mask")) {}
  int begin, end, ellipsis, new_axis, shrink;
  static bool has(int mask, size_t entry) { return mask >> entry & 1; }
};

// The range of one axis: its first element and how many.
std::pair<int64_t, int64_t> stepped_range(int64_t dim, int64_t begin, int64_t end, int64_t step,
                                          bool from_start, bool to_end) {
  int64_t lowest = step > 0 ? 0 : -1;
  int64_t highest = step > 0 ? dim : dim - 1;
  auto limited = [&](int64_t at) { return std::clamp(at < 0 ? at + dim : at, lowest, highest); };
  int64_t first = from_start ? (step > 0 ? lowest : highest) : limited(begin);
  int64_t last = to_end ? (step > 0 ? highest : lowest) : limited(end);
  int64_t towards_zero = step > 0 ? 1 : -1;
  int64_t count = (last - first + step - towards_zero) / step;
  return {first, std::max<int64_t>(count, 0)};
}

StridedSlice strided_slice_of(Call& call, const Dims& dims) {
  Dims begin = call.host_integers(1);
  Dims end = call.host_integers(2);
  Dims steps = call.host_integers(3);
  SliceMasks masks(call);
  Dims own = strides_of(dims);
  StridedSlice slice;
  size_t d = 0;
  auto take = [&](int64_t first, int64_t count, int64_t step) {
    slice.shape.push_back(count);
    slice.walked.push_back(count);
    slice.strides.push_back(own[d] * step);
    slice.first += first * own[d];
    ++d;
  };
  auto uses_an_axis = [&](size_t i) {
    return !masks.has(masks.new_axis, i) && !masks.has(masks.ellipsis, i);
  };
  size_t named = 0;
  for (size_t i = 0; i < begin.size(); ++i) named += uses_an_axis(i);
  for (size_t i = 0; i < begin.size(); ++i) {
    if (masks.has(masks.ellipsis, i)) {
      for (size_t left = dims.size() - named; left > 0; --left) take(0, dims[d], 1);
    } else if (masks.has(masks.new_axis, i)) {
      slice.shape.push_back(1);
    } else if (masks.has(masks.shrink, i)) {
      int64_t at = begin[i] < 0 ? begin[i] + dims[d] : begin[i];
      if (at < 0 || at >= dims[d]) call.fail("the slice is out of range");
      slice.first += at * own[d];
      ++d;
    } else {
      bool from_start = masks.has(masks.begin, i);
      bool to_end = masks.has(masks.end, i);
      auto [first, count] =
          stepped_range(dims[d], begin[i], end[i], steps[i], from_start, to_end);
      take(first, count, steps[i]);
    }
  }
  while (d < dims.size()) take(0, dims[d], 1);
  return slice;
}

void strided_slice(Call& call) {
  View x = call.input(0);
  StridedSlice slice = strided_slice_of(call, x.dims);
  if (!call.ok()) return;
  View y = call.output(0, slice.shape);
  move(call, slice.walked, {x, slice.strides, slice.first}, {y, strides_of(slice.walked)});
}

void strided_slice_grad(Call& call) {
  Dims dims = call.host_integers(0);
  StridedSlice slice = strided_slice_of(call, dims);
  View dy = call.input(4);
  View dx = call.output(0, dims);
  call.run([=] { std::memset(dx.data, 0, dx.bytes); });
  move(call, slice.walked, {dy, strides_of(slice.walked)}, {dx, slice.strides, slice.first});
}

void transpose(Call& call) {
  View x = call.input(0);
  Dims own = strides_of(x.dims);
  Dims dims;
  Dims strides;
  for (int64_t axis : call.host_integers(1)) {
    dims.push_back(x.dims.at(axis));
    strides.push_back(own.at(axis));
  }
  View y = call.output(0, dims);
  move(call, dims, {x, strides}, {y, strides_of(dims)});
}

void broadcast_to(Call& call) {
  View x = call.input(0);
  Dims dims = call.host_integers(1);
  broadcast(call, x.dims, dims);
  if (!call.ok()) return;
  View y = call.output(0, dims);
  move(call, dims, {x, broadcast_strides(x.dims, dims)}, {y, strides_of(dims)});
}

void tile(Call& call) {
  View x = call.input(0);
  Dims times = call.host_integers(1);
  Dims own = strides_of(x.dims);
  Dims dims;
  Dims walked;  // each axis twice: its tiles, and the elements in a tile
  Dims strides;
  for (size_t d = 0; d < times.size(); ++d) {
    dims.push_back(times[d] * x.dims[d]);
    walked.insert(walked.end(), {times[d], x.dims[d]});
    strides.insert(strides.end(), {0, own[d]});
  }
  View y = call.output(0, dims);
  move(call, walked, {x, strides}, {y, strides_of(walked)});
}

void fill(Call& call) {
  Dims dims = call.host_integers(0);
  View value = call.input(1);
  View y = call.output(0, dims);
  move(call, dims, {value, Dims(dims.size(), 0)}, {y, strides_of(dims)});
}

void empty(Call& call) {
  View y = call.output(0, call.host_integers(0));
  bool has_zeros = call.attr<bool>("init");
  call.run([=] {
    if (has_zeros) std::memset(y.data, 0, y.bytes);
  });
}

// ---- Rows by index ----

void gather_along(Call& call, int axis) {
  View x = call.input(0);
  View indices = call.input(1);
  Dims dims(x.dims.begin(), x.dims.begin() + axis);
  dims.insert(dims.end(), indices.dims.begin(), indices.dims.end());
  dims.insert(dims.end(), x.dims.begin() + axis + 1, x.dims.end());
  View y = call.output(0, dims);
  int64_t outer = product(x.dims, 0, axis);
  int64_t row_bytes = product(x.dims, axis + 1, x.dims.size()) * x.width;
  int64_t limit = x.dims[axis];
  call.run([=] {
    for (int64_t n = 0; n < outer * indices.size; ++n) {
      int64_t index = integer_at(indices, n % indices.size);
      int64_t from = n / indices.size * limit + index;
      char* to = y.data + n * row_bytes;
      // As on a GPU, an index out of range gives zeros.
      bool exists = index >= 0 && index < limit;
      exists ? std::memcpy(to, x.data + from * row_bytes, row_bytes)
             : std::memset(to, 0, row_bytes);
    }
  });
}

void gather(Call& call) { gather_along(call, 0); }

void gather_v2(Call& call) {
  size_t rank = call.input(0).dims.size();
  int axis = call.axis(call.host_integer(2), rank);
  if (call.attr<int32_t>("batch_dims")) call.fail("not emulated: batch_dims");
  if (call.ok()) gather_along(call, axis);
}

void unsorted_segment_sum(Call& call) {
  View rows = call.input(0);
  View indices = call.input(1);
  Dims dims = {call.host_integer(2)};
  dims.insert(dims.end(), rows.dims.begin() + indices.dims.size(), rows.dims.end());
  View sums = call.output(0, dims);
  int64_t row = product(dims, 1, dims.size());
  call.run([=] {
    for_number(sums.type, [&](auto zero) {
      using T = decltype(zero);
      std::fill_n(sums.as<T>(), sums.size, T(0));
      for (int64_t n = 0; n < indices.size; ++n) {
        int64_t index = integer_at(indices, n);
        if (index < 0 || index >= dims[0]) continue;  // a GPU drops it
        T* sum = sums.as<T>() + index * row;
        const T* term = rows.as<T>() + n * row;
        for (int64_t k = 0; k < row; ++k) sum[k] = T(sum[k] + term[k]);
      }
    });
  });
}

// ---- Layers ----

// A matrix, or its transpose.
struct Matrix {
  View view;
  bool is_transposed;
  int64_t rows() const { return view.dims[is_transposed ? 1 : 0]; }
  int64_t columns() const { return view.dims[is_transposed ? 0 : 1]; }
  int64_t at(int64_t row, int64_t column) const {
    return is_transposed ? column * rows() + row : row * columns() + column;
  }
};

template <class T>
void multiply(const Matrix& a, const Matrix& b, const View& product) {
  using W = Wide<T>;
  const T* a_values = a.view.as<T>();
  const T* b_values = b.view.as<T>();
  int64_t columns = b.columns();
  std::vector<W> sums(columns);
  for (int64_t row = 0; row < a.rows(); ++row) {
    std::fill(sums.begin(), sums.end(), W(0));
    for (int64_t k = 0; k < a.columns(); ++k) {
      W factor = W(a_values[a.at(row, k)]);
      for (int64_t column = 0; column < columns; ++column) {
        sums[column] += factor * W(b_values[b.at(k, column)]);
      }
    }
    for (int64_t n = 0; n < columns; ++n) product.as<T>()[row * columns + n] = T(sums[n]);
  }
}

void mat_mul(Call& call) {
  Matrix a{call.input(0), call.attr<bool>("transpose_a")};
  Matrix b{call.input(1), call.attr<bool>("transpose_b")};
  bool has_matrices = a.view.dims.size() == 2 && b.view.dims.size() == 2;
  if (!has_matrices || a.columns() != b.rows()) return call.fail("the shapes do not fit");
  View product = call.output(0, {a.rows(), b.columns()});
  call.run([=] {
    for_float_or_complex(product.type, [&](auto zero) {
      multiply<decltype(zero)>(a, b, product);
    });
  });
}

bool has_channels_last(Call& call) {
  bool is_last = call.attr<std::string>("data_format") != "NCHW";
  if (!is_last) call.fail("not emulated: NCHW");
  return is_last;
}

void bias_add(Call& call) {
  View x = call.input(0);
  View bias = call.input(1);
  View y = call.output(0, x.dims, {0});
  if (!has_channels_last(call)) return;
  call.run([=] {
    for_real(x.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t n = 0; n < x.size; ++n) {
        y.as<T>()[n] = T(x.as<T>()[n] + bias.as<T>()[n % bias.size]);
      }
    });
  });
}

void bias_add_grad(Call& call) {
  View x = call.input(0);
  View y = call.output(0, {x.dims.back()});
  if (!has_channels_last(call)) return;
  call.run([=] {
    for_float(x.type, [&](auto zero) {
      using T = decltype(zero);
      std::vector<double> totals(y.size);
      for (int64_t n = 0; n < x.size; ++n) totals[n % y.size] += double(x.as<T>()[n]);
      for (int64_t n = 0; n < y.size; ++n) y.as<T>()[n] = T(totals[n]);
    });
  });
}

// log(softmax(row))[k] is row[k] minus this.
template <class T>
double log_sum_exp(const T* row, int64_t width) {
  double most = -INFINITY;
  for (int64_t k = 0; k < width; ++k) most = std::max(most, double(row[k]));
  double total = 0;
  for (int64_t k = 0; k < width; ++k) total += std::exp(double(row[k]) - most);
  return most + std::log(total);
}

template <bool is_log>
void softmax(Call& call) {
  View x = call.input(0);
  View y = call.output(0, x.dims, {0});
  int64_t width = x.dims.back();
  call.run([=] {
    for_float(x.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t first = 0; first < x.size; first += width) {
        const T* row = x.as<T>() + first;
        double total = log_sum_exp(row, width);
        for (int64_t k = 0; k < width; ++k) {
          double value = double(row[k]) - total;
          y.as<T>()[first + k] = T(is_log ? value : std::exp(value));
        }
      }
    });
  });
}

// `label(T(), row, k)` is the probability of class k in this row, of the wanted result.
template <class Label>
void cross_entropy(Call& call, Label label) {
  View logits = call.input(0);
  if (logits.dims != call.input(1).dims && call.input(1).dims.size() != 1) {
    return call.fail("not emulated: broadcast labels");
  }
  View loss = call.output(0, {logits.dims[0]});
  View grad = call.output(1, logits.dims);
  int64_t width = logits.dims[1];
  call.run([=] {
    for_float(logits.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t row = 0; row < loss.size; ++row) {
        const T* values = logits.as<T>() + row * width;
        double total = log_sum_exp(values, width);
        double sum = 0;
        for (int64_t k = 0; k < width; ++k) {
          double log_probability = double(values[k]) - total;
          double wanted = label(zero, row, k);
          if (wanted != 0) sum -= wanted * log_probability;
          grad.as<T>()[row * width + k] = T(std::exp(log_probability) - wanted);
        }
        loss.as<T>()[row] = T(sum);
      }
    });
  });
}

void dense_cross_entropy(Call& call) {
  View labels = call.input(1);
  cross_entropy(call, [=](auto zero, int64_t row, int64_t k) {
    return double(labels.as<decltype(zero)>()[row * labels.dims[1] + k]);
  });
}

void sparse_cross_entropy(Call& call) {
  View labels = call.input(1);
  cross_entropy(call, [=](auto, int64_t row, int64_t k) {
    return double(integer_at(labels, row) == k);
  });
}

// ---- Random numbers: others than TensorFlow's, but the same in each run ----

std::mt19937_64 random_engine(const Call& call) {
  uint64_t seed = call.attr<int64_t>("seed") * 7919 + call.attr<int64_t>("seed2") * 104729;
  return std::mt19937_64(seed * 1000003 + call.number);
}

template <class Draw>
void draw_floats(Call& call, Draw draw) {
  View y = call.output(0, call.host_integers(0));
  call.run([=, engine = random_engine(call)]() mutable {
    for_float(y.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t n = 0; n < y.size; ++n) y.as<T>()[n] = T(draw(engine));
    });
  });
}

void random_uniform(Call& call) {
  draw_floats(call, [](auto& engine) {  // below 1 in 8 bits, too, which bfloat16 has
    return std::floor(std::uniform_real_distribution<double>()(engine) * 256) / 256;
  });
}

void random_normal(Call& call) {
  draw_floats(call, [](auto& engine) { return std::normal_distribution<double>()(engine); });
}

void truncated_normal(Call& call) {
  draw_floats(call, [](auto& engine) {
    std::normal_distribution<double> normal;
    double value = normal(engine);
    while (std::abs(value) > 2) value = normal(engine);
    return value;
  });
}

}  // namespace

void add_array_bodies(Bodies& bodies) {
  bodies.insert({
      {"Abs", unary<Absolute>},
      {"Exp", unary<Exp>},
      {"Floor", unary<Floor>},
      {"Inv", unary<Reciprocal>},
      {"Log", unary<Log>},
      {"Neg", unary<Negative>},
      {"OnesLike", unary<One>},
      {"Reciprocal", unary<Reciprocal>},
      {"Relu", unary<Relu>},
      {"Rsqrt", unary<InverseRoot>},
      {"Sigmoid", unary<Sigmoid>},
      {"Sign", unary<Sign>},
      {"Sqrt", unary<SquareRoot>},
      {"Square", unary<Square>},
      {"Tanh", unary<Tanh>},
      {"ZerosLike", unary<Zero>},

      {"IsFinite", test<IsFinite>},
      {"IsInf", test<IsInf>},
      {"IsNan", test<IsNan>},
      {"LogicalNot", test<Not>},

      {"Add", binary<Add>},
      {"AddV2", binary<Add>},
      {"Div", binary<Divide>},
      {"DivNoNan", binary<DivideNoNan>},
      {"Maximum", binary<Maximum>},
      {"Minimum", binary<Minimum>},
      {"Mul", binary<Multiply>},
      {"Pow", binary<Power>},
      {"RealDiv", binary<Divide>},
      {"ReluGrad", binary<ReluGrad>},
      {"SigmoidGrad", binary<SigmoidGrad>},
      {"SquaredDifference", binary<SquaredDifference>},
      {"Sub", binary<Subtract>},
      {"TanhGrad", binary<TanhGrad>},

      {"Equal", compare<Equal>},
      {"Greater", compare<Greater>},
      {"GreaterEqual", compare<GreaterEqual>},
      {"Less", compare<Less>},
      {"LessEqual", compare<LessEqual>},
      {"LogicalAnd", compare<And>},
      {"LogicalOr", compare<Or>},
      {"NotEqual", compare<NotEqual>},

      {"AddN", add_n},
      {"Cast", cast},
      {"Select", select},
      {"SelectV2", select},

      {"All", reduce<And, Start::ONE>},
      {"Any", reduce<Or, Start::ZERO>},
      {"L2Loss", l2_loss},
      {"Max", reduce<Maximum, Start::LOWEST>},
      {"Mean", reduce<Add, Start::ZERO, true>},
      {"Min", reduce<Minimum, Start::HIGHEST>},
      {"Prod", reduce<Multiply, Start::ONE>},
      {"Sum", reduce<Add, Start::ZERO>},

      {"BroadcastTo", broadcast_to},
      {"Concat", concat},
      {"ConcatV2", concat_v2},
      {"Empty", empty},
      {"Fill", fill},
      {"Pack", pack},
      {"Slice", slice},
      {"Split", split},
      {"SplitV", split_v},
      {"StridedSlice", strided_slice},
      {"StridedSliceGrad", strided_slice_grad},
      {"Tile", tile},
      {"Transpose", transpose},
      {"Unpack", unpack},

      {"Gather", gather},
      {"GatherV2", gather_v2},
      {"UnsortedSegmentSum", unsorted_segment_sum},

      {"BiasAdd", bias_add},
      {"BiasAddGrad", bias_add_grad},
      {"LogSoftmax", softmax<true>},
      {"MatMul", mat_mul},
      {"Softmax", softmax<false>},
      {"SoftmaxCrossEntropyWithLogits", dense_cross_entropy},
      {"SparseSoftmaxCrossEntropyWithLogits", sparse_cross_entropy},

      {"RandomStandardNormal", random_normal},
      {"RandomUniform", random_uniform},
      {"TruncatedNormal", truncated_normal},
  });
}

// ---- Registration ----

namespace {

// Kernels of an op, one for each combination of dtypes.
struct Registration {
  const char* op;
  std::vector<const char*> host_arguments;
  std::vector<std::pair<const char*, std::vector<const char*>>> dtypes;  // by attribute
};

const std::vector<Registration>& registrations() {
  static const auto& all = *new std::vector<Registration>{
#include "registrations.inc"
  };
  return all;
}

const Bodies& bodies() {
  static const auto& all = *[] {
    auto bodies = new Bodies;
    add_array_bodies(*bodies);
    add_variable_bodies(*bodies);
    return bodies;
  }();
  return all;
}

void* create_kernel(TF_OpKernelConstruction* c_construction) {
  auto construction = reinterpret_cast<tensorflow::OpKernelConstruction*>(c_construction);
  const tensorflow::NodeDef& def = construction->def();
  return new Kernel{bodies().at(def.op()), def};
}

void run_kernel(void* kernel, TF_OpKernelContext* context) {
  auto& known = *static_cast<Kernel*>(kernel);
  Call call(context, known);
  known.body(call);
}

void delete_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

using Constraints = std::map<std::string, DataType>;

void register_kernel(const Registration& wanted, const Constraints& constraints) {
  TF_Status* status = TF_NewStatus();
  auto* builder =
      TF_NewKernelBuilder(wanted.op, "GPU", create_kernel, run_kernel, delete_kernel);
  for (const auto& [attribute, dtype] : constraints) {
    TF_KernelBuilder_TypeConstraint(builder, attribute.c_str(), TF_DataType(dtype), status);
  }
  for (const char* argument : wanted.host_arguments) {
    TF_KernelBuilder_HostMemory(builder, argument);
  }
  TF_RegisterKernelBuilder(wanted.op, builder, status);
  CHECK_EQ(TF_GetCode(status), TF_OK) << wanted.op << ": " << TF_Message(status);
  TF_DeleteStatus(status);
}

void register_combinations(const Registration& wanted, Constraints chosen) {
  if (chosen.size() == wanted.dtypes.size()) return register_kernel(wanted, chosen);
  const auto& [attribute, dtypes] = wanted.dtypes[chosen.size()];
  for (const char* name : dtypes) {
    CHECK(tensorflow::DataTypeFromString(name, &chosen[attribute])) << name;
    register_combinations(wanted, chosen);
  }
}

}  // namespace
}  // namespace emulated_gpu

extern "C" __attribute__((visibility("default"))) void TF_InitKernel() {
  using namespace emulated_gpu;
  for (const Registration& wanted : registrations()) {
    CHECK(bodies().count(wanted.op)) << wanted.op << " has no body";
    register_combinations(wanted, {});
  }
}
