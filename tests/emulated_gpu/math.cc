// Kernels that compute: ops of each element, reductions, and a small model's layers. GPUs also have
// convolutions, pooling and batch normalization (cuDNN's), which are not emulated.

#include <cmath>
#include <deque>
#include <limits>

#include "kernel.h"

namespace emulated_gpu {
namespace {

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

UNARY(Same, x);
UNARY(Zero, 0);
UNARY(One, 1);
UNARY(Negative, -x);
UNARY(Square, x* x);
UNARY(Reciprocal, T(1) / x);
UNARY(Exp, std::exp(x));
UNARY(Cosine, std::cos(x));
UNARY(Sine, std::sin(x));
REAL_UNARY(Ceiling, std::ceil(x));
REAL_UNARY(Elu, x < T(0) ? std::expm1(x) : x);
REAL_UNARY(ErrorFunction, std::erf(x));
REAL_UNARY(ExpMinusOne, std::expm1(x));
REAL_UNARY(LogOnePlus, std::log1p(x));
REAL_UNARY(Relu6, std::clamp(x, T(0), T(6)));
REAL_UNARY(Round, std::nearbyint(x));
REAL_UNARY(Softplus, std::log1p(std::exp(x)));
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
BINARY(DivideNoNanOfZero, x == T(0) ? T(0) : x / y);

// Gradients, from the op's result and that of the result, or from the latter and x.
REAL_BINARY(ReluGrad, y > T(0) ? x : T(0));
REAL_BINARY(TanhGrad, y*(1 - x * x));
REAL_BINARY(SigmoidGrad, y* x*(1 - x));
REAL_BINARY(EluGrad, y < T(0) ? x * (y + 1) : x);
REAL_BINARY(Relu6Grad, T(0) < y && y < T(6) ? x : T(0));
REAL_BINARY(SoftplusGrad, x / (1 + std::exp(-y)));
REAL_BINARY(SquareRootGrad, y / (2 * x));
REAL_BINARY(InverseRootGrad, -y* x* x* x / 2);
BINARY(ReciprocalGrad, -y* x* x);

// Rounds the quotient down, as Python does. Numbers divided by zero give any integer on a GPU.
struct FloorDivide {
  template <class T, IF_REAL(T)>
  T operator()(T x, T y) const {
    if constexpr (std::is_integral_v<T>) {
      if (y == T(0)) return T(0);
      bool rounds_down = x % y != 0 && (x < T(0)) != (y < T(0));
      return T(x / y - (rounds_down ? 1 : 0));
    } else {
      return std::floor(x / y);
    }
  }
};

struct FloorRemainder {
  template <class T, IF_REAL(T)>
  T operator()(T x, T y) const {
    if (y == T(0) && std::is_integral_v<T>) return T(0);
    T remainder;
    if constexpr (std::is_integral_v<T>) remainder = T(x % y);
    else remainder = std::fmod(x, y);
    bool has_other_sign = remainder != T(0) && (remainder < T(0)) != (y < T(0));
    return has_other_sign ? T(remainder + y) : remainder;
  }
};

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

void add_n(Call& call) {
  std::vector<View> terms = call.inputs(0, call.context->num_inputs());
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

void clip_by_value(Call& call) {
  View x = call.input(0);
  View least = call.input(1);
  View most = call.input(2);
  View y = call.output(0, x.dims, {0});
  call.run([=] {
    for_real(x.type, [&](auto zero) {
      using T = decltype(zero);
      auto limit_at = [](const View& limit, int64_t n) {
        return limit.as<T>()[limit.size == 1 ? 0 : n];
      };
      for (int64_t n = 0; n < x.size; ++n) {
        T raised = std::max(x.as<T>()[n], limit_at(least, n));
        y.as<T>()[n] = std::min(raised, limit_at(most, n));
      }
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

// ArgMax and ArgMin: `is_better(a, b)` tells whether a goes before b.
template <class Better>
void arg_best(Call& call) {
  View x = call.input(0);
  int axis = call.axis(call.host_integer(1), x.dims.size());
  if (!call.ok()) return;
  Dims dims = x.dims;
  dims.erase(dims.begin() + axis);
  View y = call.output(0, dims);
  int64_t count = x.dims[axis];
  int64_t stride = product(x.dims, axis + 1, x.dims.size());
  call.run([=] {
    for_real(x.type, [&](auto zero) {
      using T = decltype(zero);
      for (int64_t n = 0; n < y.size; ++n) {
        const T* first = x.as<T>() + n / stride * count * stride + n % stride;
        int64_t best = 0;
        for (int64_t k = 1; k < count; ++k) {
          if (Better()(first[k * stride], first[best * stride])) best = k;
        }
        set_integer(y, n, best);
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

// Matrices in the two last dimensions.
void batch_mat_mul(Call& call) {
  View a = call.input(0);
  View b = call.input(1);
  bool is_complex = call.attr<DataType>("T") == tensorflow::DT_COMPLEX64 ||
                    call.attr<DataType>("T") == tensorflow::DT_COMPLEX128;
  bool a_adjoint = call.attr<bool>("adj_x");
  bool b_adjoint = call.attr<bool>("adj_y");
  size_t rank = a.dims.size();
  bool has_same_batches = b.dims.size() == rank &&
                          std::equal(a.dims.begin(), a.dims.end() - 2, b.dims.begin());
  if (!has_same_batches) return call.fail("not emulated: broadcast matrices");
  if (is_complex && (a_adjoint || b_adjoint)) return call.fail("not emulated: adjoints");
  auto matrix = [](const View& view, int64_t n, bool is_transposed) {
    View one = view;
    one.dims.erase(one.dims.begin(), one.dims.end() - 2);
    one.size = product(one.dims);
    one.bytes = one.size * one.width;
    one.data += n * one.bytes;
    return Matrix{one, is_transposed};
  };
  Dims dims = a.dims;
  dims[rank - 2] = matrix(a, 0, a_adjoint).rows();
  dims[rank - 1] = matrix(b, 0, b_adjoint).columns();
  View products = call.output(0, dims);
  int64_t count = product(dims, 0, rank - 2);
  call.run([=] {
    for_float_or_complex(products.type, [&](auto zero) {
      for (int64_t n = 0; n < count; ++n) {
        View product = matrix(products, n, false).view;
        multiply<decltype(zero)>(matrix(a, n, a_adjoint), matrix(b, n, b_adjoint), product);
      }
    });
  });
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

}  // namespace

void add_math_bodies(Bodies& bodies) {
  bodies.insert({
      {"Abs", unary<Absolute>},
      {"Ceil", unary<Ceiling>},
      {"Cos", unary<Cosine>},
      {"Elu", unary<Elu>},
      {"Erf", unary<ErrorFunction>},
      {"Exp", unary<Exp>},
      {"Expm1", unary<ExpMinusOne>},
      {"Floor", unary<Floor>},
      {"Inv", unary<Reciprocal>},
      {"Log", unary<Log>},
      {"Log1p", unary<LogOnePlus>},
      {"Neg", unary<Negative>},
      {"OnesLike", unary<One>},
      {"Reciprocal", unary<Reciprocal>},
      {"Relu", unary<Relu>},
      {"Relu6", unary<Relu6>},
      {"Round", unary<Round>},
      {"Rsqrt", unary<InverseRoot>},
      {"Sigmoid", unary<Sigmoid>},
      {"Sign", unary<Sign>},
      {"Sin", unary<Sine>},
      {"Snapshot", unary<Same>},
      {"Softplus", unary<Softplus>},
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
      {"FloorDiv", binary<FloorDivide>},
      {"FloorMod", binary<FloorRemainder>},
      {"Maximum", binary<Maximum>},
      {"Minimum", binary<Minimum>},
      {"Mul", binary<Multiply>},
      {"Pow", binary<Power>},
      {"RealDiv", binary<Divide>},
      {"SquaredDifference", binary<SquaredDifference>},
      {"Sub", binary<Subtract>},
      {"Xdivy", binary<DivideNoNanOfZero>},

      {"EluGrad", binary<EluGrad>},
      {"InvGrad", binary<ReciprocalGrad>},
      {"ReciprocalGrad", binary<ReciprocalGrad>},
      {"Relu6Grad", binary<Relu6Grad>},
      {"ReluGrad", binary<ReluGrad>},
      {"RsqrtGrad", binary<InverseRootGrad>},
      {"SigmoidGrad", binary<SigmoidGrad>},
      {"SoftplusGrad", binary<SoftplusGrad>},
      {"SqrtGrad", binary<SquareRootGrad>},
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
      {"ClipByValue", clip_by_value},
      {"Select", select},
      {"SelectV2", select},

      {"All", reduce<And, Start::ONE>},
      {"Any", reduce<Or, Start::ZERO>},
      {"ArgMax", arg_best<Greater>},
      {"ArgMin", arg_best<Less>},
      {"L2Loss", l2_loss},
      {"Max", reduce<Maximum, Start::LOWEST>},
      {"Mean", reduce<Add, Start::ZERO, true>},
      {"Min", reduce<Minimum, Start::HIGHEST>},
      {"Prod", reduce<Multiply, Start::ONE>},
      {"Sum", reduce<Add, Start::ZERO>},

      {"BatchMatMul", batch_mat_mul},
      {"BatchMatMulV2", batch_mat_mul},
      {"BiasAdd", bias_add},
      {"BiasAddGrad", bias_add_grad},
      {"LogSoftmax", softmax<true>},
      {"MatMul", mat_mul},
      {"Softmax", softmax<false>},
      {"SoftmaxCrossEntropyWithLogits", dense_cross_entropy},
      {"SparseSoftmaxCrossEntropyWithLogits", sparse_cross_entropy},
  });
}

}  // namespace emulated_gpu
