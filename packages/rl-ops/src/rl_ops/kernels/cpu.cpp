// The two row kernels for a CPU, with a plain C interface: see rl_ops/kernels/__init__.py for what they compute.
//
// Vectors are the compilers' own extension (GCC and Clang, any processor). Sixteen numbers at a time, chunks of a
// row that stay in the first-level cache between the pass that finds the maximum and the one that exponentiates.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr int64_t CHUNK = 4096;
constexpr int64_t PARALLEL_FROM = 1 << 16;
constexpr float LOG2E = 1.44269504088896340736f;

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t uints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

inline floats all(float x) { return floats{} + x; }

template <typename To, typename From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

struct Float32 {
  typedef float type;
  static floats load(const float* p) {
    floats x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(float* p, floats x) { std::memcpy(p, &x, sizeof(x)); }
  static float get(const float* p) { return *p; }
  static void put(float* p, float x) { *p = x; }
};

struct BFloat16 {
  typedef uint16_t type;
  static floats load(const uint16_t* p) {
    halves h;
    std::memcpy(&h, p, sizeof(h));
    return bits<floats>(__builtin_convertvector(h, uints) << 16);
  }
  static void store(uint16_t* p, floats x) {
    // to nearest, ties to even; NaN keeps a bit of its payload
    uints u = bits<uints>(x);
    uints rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uints kept = (x == x) ? rounded : ((u >> 16) | 0x40);
    halves h = __builtin_convertvector(kept, halves);
    std::memcpy(p, &h, sizeof(h));
  }
  static float get(const uint16_t* p) { return bits<float>(uint32_t(*p) << 16); }
  static void put(uint16_t* p, float x) {
    uint32_t u = bits<uint32_t>(x);
    *p = uint16_t(x == x ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40);
  }
};

// 2**u for u <= 0: exactly 0 below -127, NaN for NaN. Polynomial of degree 5 on [-0.5, 0.5], relative error 8e-8
// (fitted by Lawson's iteration); the exponent is put together from the integer part's own bits.
inline floats exp2_nonpositive(floats u) {
  const float magic = 12582912.0f + 127.0f;  // adding it rounds to an integer and leaves that + 127 in the low bits
  floats bounded = (u < -127.0f) ? all(-127.0f) : u;
  floats shifted = bounded + magic;
  floats f = bounded - (shifted - magic);
  floats p = all(0.001327647199111475f);
  p = p * f + 0.0096755413344531f;
  p = p * f + 0.055507132735027435f;
  p = p * f + 0.24022119723840085f;
  p = p * f + 0.6931469670647581f;
  p = p * f + 1.000000071654685f;
  return p * bits<floats>(bits<ints>(shifted) << 23);
}

inline float sum(floats x) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += x[i];
  return total;
}

inline float largest(floats x) {
  float top = x[0];
  for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// The last, incomplete vector of a row, filled up with -inf.
template <typename D>
inline floats load_tail(const typename D::type* p, int64_t count) {
  floats x = all(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i++) x[i] = D::get(p + i);
  return x;
}

template <typename D>
inline float chunk_max(const typename D::type* p, int64_t n) {
  const floats low = all(-std::numeric_limits<float>::infinity());
  floats top[4] = {low, low, low, low};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int k = 0; k < 4; k++) {
      floats x = D::load(p + i + k * LANES);
      top[k] = x > top[k] ? x : top[k];
    }
  for (; i < n; i += LANES) {
    floats x = i + LANES <= n ? D::load(p + i) : load_tail<D>(p + i, n - i);
    top[0] = x > top[0] ? x : top[0];
  }
  for (int k = 1; k < 4; k++) top[0] = top[k] > top[0] ? top[k] : top[0];
  return largest(top[0]);
}

template <bool ENTROPY>
inline void add_exp(floats x, float top, float factor, floats& total, floats& total_u) {
  floats u = (x - top) * factor;
  floats e = exp2_nonpositive(u);
  total += e;
  if (ENTROPY) total_u += e * ((u < -127.0f) ? all(-127.0f) : u);
}

template <typename D, bool ENTROPY>
void stats_of_row(const typename D::type* row, int64_t width, float scale, float* out[3], int64_t at) {
  const float factor = scale * LOG2E;
  float top = -std::numeric_limits<float>::infinity();
  double total = 0, total_u = 0;
  for (int64_t start = 0; start < width; start += CHUNK) {
    const typename D::type* p = row + start;
    const int64_t n = std::min(CHUNK, width - start);
    const float here = chunk_max<D>(p, n);
    if (here > top) {
      if (total > 0) {
        const double u = (double(top) - double(here)) * factor;
        const double shrink = std::exp2(u);
        total_u = (total_u + total * u) * shrink;
        total *= shrink;
      }
      top = here;
    }
    const float base = std::isinf(top) && top < 0 ? 0.0f : top;
    floats s[4] = {}, su[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
      for (int k = 0; k < 4; k++) {
        __builtin_prefetch(p + i + k * LANES + CHUNK);
        add_exp<ENTROPY>(D::load(p + i + k * LANES), base, factor, s[k], su[k]);
      }
    for (; i < n; i += LANES)
      add_exp<ENTROPY>(i + LANES <= n ? D::load(p + i) : load_tail<D>(p + i, n - i), base, factor, s[0], su[0]);
    total += double(sum((s[0] + s[1]) + (s[2] + s[3])));
    if (ENTROPY) total_u += double(sum((su[0] + su[1]) + (su[2] + su[3])));
  }
  out[0][at] = top;
  out[1][at] = float(total);
  if (ENTROPY) out[2][at] = float(total_u / LOG2E);
}

struct RowGrad {
  const int64_t* index;
  const float* grad_logps;  // null: no gradient of the log-probs
  int64_t count;
  float top, total, grad_entropy, entropy;
  bool with_entropy;
};

template <typename D, bool ENTROPY>
void grad_of_row(const typename D::type* row, int64_t width, float scale, const RowGrad& g,
                 typename D::type* out, std::vector<float>& picked) {
  const float factor = scale * LOG2E;
  const float base = std::isinf(g.top) && g.top < 0 ? 0.0f : g.top;
  const float log_total = std::log(g.total);
  // a row without gradient is not read, so nothing that it holds (NaN) reaches the result; NaN is not 0
  bool active = g.with_entropy && g.grad_entropy != 0.0f;
  for (int64_t k = 0; g.grad_logps && k < g.count; k++) active = active || g.grad_logps[k] != 0.0f;
  if (!active) {
    std::fill(out, out + width, typename D::type(0));
    return;
  }
  float grad_sum = 0;
  for (int64_t k = 0; k < g.count; k++) {
    grad_sum += g.grad_logps ? g.grad_logps[k] : 0.0f;
    const int64_t j = g.index[k];
    picked[k] = j >= 0 && j < width ? D::get(row + j) : 0.0f;
  }
  // d loss / d z = scale * p * (a * u + b), plus scale * grad at the index; u = log2(e) * (log p + log total)
  const float inverse = scale / g.total;
  const float a = ENTROPY ? -g.grad_entropy * inverse / LOG2E : 0.0f;
  const float b = -inverse * (grad_sum + (ENTROPY ? g.grad_entropy * (g.entropy - log_total) : 0.0f));
  auto gradient = [&](floats x) {
    floats u = (x - base) * factor;
    floats e = exp2_nonpositive(u);
    if (!ENTROPY) return e * b;
    return e * (((u < -127.0f) ? all(-127.0f) : u) * a + b);
  };
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) D::store(out + i, gradient(D::load(row + i)));
  if (i < width) {
    floats x = gradient(load_tail<D>(row + i, width - i));
    for (int64_t k = 0; i + k < width; k++) D::put(out + i + k, x[k]);
  }
  for (int64_t k = 0; g.grad_logps && k < g.count; k++) {
    const int64_t j = g.index[k];
    if (j < 0 || j >= width) continue;
    float own = 0;
    for (int64_t other = 0; other < g.count; other++)
      if (g.index[other] == j) own += g.grad_logps[other];
    D::put(out + j, gradient(all(picked[k]))[0] + own * scale);
  }
}

template <typename Work>
void over_rows(int64_t rows, int64_t width, int threads, const Work& work) {
  threads = int(std::min<int64_t>(threads, rows * width / PARALLEL_FROM));
  if (threads <= 1) return work(0, rows);
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++)
    others.emplace_back([&, t] { work(rows * t / threads, rows * (t + 1) / threads); });
  work(0, rows / threads);
  for (auto& other : others) other.join();
}

struct Shape {
  int64_t outer, inner, width, outer_stride, inner_stride;
  int64_t offset(int64_t row) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

template <typename D>
void stats_of(const void* z, const Shape& shape, float scale, int entropy, float* out[3], int threads) {
  auto data = static_cast<const typename D::type*>(z);
  over_rows(shape.outer * shape.inner, shape.width, threads, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++) {
      if (entropy)
        stats_of_row<D, true>(data + shape.offset(row), shape.width, scale, out, row);
      else
        stats_of_row<D, false>(data + shape.offset(row), shape.width, scale, out, row);
    }
  });
}

template <typename D>
void grad_of(const void* z, const Shape& shape, const int64_t* index, int64_t count, const float* const in[5],
             float scale, void* out, int threads) {
  auto data = static_cast<const typename D::type*>(z);
  auto result = static_cast<typename D::type*>(out);
  over_rows(shape.outer * shape.inner, shape.width, threads, [&](int64_t from, int64_t to) {
    std::vector<float> picked(count);
    for (int64_t row = from; row < to; row++) {
      const float *top = in[0], *total = in[1], *grad_logps = in[2], *grad_entropy = in[3], *entropy = in[4];
      RowGrad g{index + row * count, grad_logps ? grad_logps + row * count : nullptr,
                count,               top[row],
                total[row],          grad_entropy ? grad_entropy[row] : 0.0f,
                grad_entropy ? entropy[row] : 0.0f, grad_entropy != nullptr};
      auto target = result + row * shape.width;
      if (grad_entropy)
        grad_of_row<D, true>(data + shape.offset(row), shape.width, scale, g, target, picked);
      else
        grad_of_row<D, false>(data + shape.offset(row), shape.width, scale, g, target, picked);
    }
  });
}

}  // namespace

extern "C" {

// z: rows of `width` numbers, float32 or bfloat16. out: maximum, sum_exp, sum_exp_d, one float a row each.
void rl_ops_row_stats(const void* z, int is_bfloat16, const int64_t* shape, float scale, int entropy,
                      float* maximum, float* sum_exp, float* sum_exp_d, int threads) {
  const Shape s{shape[0], shape[1], shape[2], shape[3], shape[4]};
  float* out[3] = {maximum, sum_exp, sum_exp_d};
  if (is_bfloat16)
    stats_of<BFloat16>(z, s, scale, entropy, out, threads);
  else
    stats_of<Float32>(z, s, scale, entropy, out, threads);
}

// out: contiguous, of z's type, may be z. grad_logps or grad_entropy (then entropy too) may be null.
void rl_ops_logits_grad(const void* z, int is_bfloat16, const int64_t* shape, const int64_t* index, int64_t count,
                        const float* maximum, const float* sum_exp, const float* grad_logps,
                        const float* grad_entropy, const float* entropy, float scale, void* out, int threads) {
  const Shape s{shape[0], shape[1], shape[2], shape[3], shape[4]};
  const float* const in[5] = {maximum, sum_exp, grad_logps, grad_entropy, entropy};
  if (is_bfloat16)
    grad_of<BFloat16>(z, s, index, count, in, scale, out, threads);
  else
    grad_of<Float32>(z, s, index, count, in, scale, out, threads);
}
}
