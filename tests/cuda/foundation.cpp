#include "foundation.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "support/device_test.hpp"

namespace {

using namespace seqmix;
using namespace seqmix::testing;

/// A small sequence of whole numbers, the same on every machine.
class numbers {
 public:
  explicit numbers(std::uint32_t seed) : state_(seed) {}
  std::uint32_t next() {
    state_ = state_ * 1664525U + 1013904223U;
    return state_ >> 8;
  }
  /// Multiples of 1/8 in [-1, 1]: their products and short sums are exact in every storage type.
  double eighths() { return (double(next() % 17) - 8) / 8; }
  double real() { return double(next()) / 8388608.0 - 1; }

 private:
  std::uint32_t state_;
};

template <class T>
char const* const type_name = "float";
template <>
char const* const type_name<bfloat16> = "bfloat16";
template <>
char const* const type_name<float16> = "float16";

template <class T>
std::uint32_t bits_of(T x) {
  if constexpr (sizeof(T) == 2)
    return x.bits;
  else
    return std::bit_cast<std::uint32_t>(x);
}

// ---- products of tiles

template <lies A, lies B>
constexpr char const* layouts = A == lies::row_major
                                    ? (B == lies::row_major ? "rows, rows" : "rows, columns")
                                    : (B == lies::row_major ? "columns, rows" : "columns, columns");

template <lies A, lies B, class T, int Columns>
struct product {
  static constexpr int width = 8 * Columns;
  int depth;
  std::vector<T> a = std::vector<T>(std::size_t(16 * depth)), b = std::vector<T>(std::size_t(width * depth));

  static std::string name() {
    return std::string("product of ") + type_name<T> + ", " + std::to_string(Columns) + " x 8 columns, " +
           layouts<A, B>;
  }
  T& left(int i, int k) { return a[std::size_t(A == lies::row_major ? i * depth + k : k * 16 + i)]; }
  T& right(int k, int j) { return b[std::size_t(B == lies::row_major ? k * width + j : j * depth + k)]; }
  std::vector<float> on_device() const {
    device_array<T> const da(a), db(b);
    device_array<float> const dc(std::size_t(16 * width));
    tile_product<A, B, T, Columns>(da.data(), db.data(), dc.data(), depth);
    return dc.download();
  }
};

template <lies A, lies B, class T, int Columns>
void exact_products(int depth) {
  product<A, B, T, Columns> p{depth};
  numbers random(7);
  for (auto& x : p.a) x = T(float(random.eighths()));
  for (auto& x : p.b) x = T(float(random.eighths()));
  auto const got = p.on_device();
  std::vector<double> want;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < p.width; ++j) {
      double sum = 0;
      for (int k = 0; k < depth; ++k) sum += double(float(p.left(i, k))) * double(float(p.right(k, j)));
      want.push_back(sum);
    }
  check_close(p.name() + ", depth " + std::to_string(depth), got, want, 0);
}

/// The same sixteen-bit or float rows everywhere in both factors: then all elements are the same sum.
template <lies A, lies B, class T, int Columns>
void products_of_equal_rows() {
  constexpr int depth = 48;
  product<A, B, T, Columns> p{depth};
  numbers random(11);
  double exact = 0, size = 0;
  float ascending = 0;
  for (int k = 0; k < depth; ++k) {
    T const x = T(float(random.real())), y = T(float(random.real()));
    for (int i = 0; i < 16; ++i) p.left(i, k) = x;
    for (int j = 0; j < p.width; ++j) p.right(k, j) = y;
    ascending = std::fma(float(x), float(y), ascending);
    exact += double(float(x)) * double(float(y));
    size += std::fabs(double(float(x)) * double(float(y)));
  }
  auto const got = p.on_device();
  for (float x : got)
    if (!check(bits_of(x) == bits_of(got[0]), p.name() + ": a sum depends on where its element stands")) break;
  // Float sums are added one after the other; tensor cores add sixteen at once, at float's precision or a little
  // less.
  if constexpr (sizeof(T) == 4)
    check(bits_of(got[0]) == bits_of(ascending), p.name() + ": sums are not added in ascending order");
  else
    check(std::fabs(double(got[0]) - exact) <= 4 * double(std::numeric_limits<float>::epsilon()) * size,
          p.name() + ": off by " + std::to_string(double(got[0]) - exact));
}

template <class T, int Columns, template <lies, lies, class, int> class Case>
void all_layouts() {
  Case<lies::row_major, lies::row_major, T, Columns>::run();
  Case<lies::row_major, lies::column_major, T, Columns>::run();
  Case<lies::column_major, lies::row_major, T, Columns>::run();
  Case<lies::column_major, lies::column_major, T, Columns>::run();
}
template <template <lies, lies, class, int> class Case>
void all_products() {
  all_layouts<float, 8, Case>();
  all_layouts<float, 3, Case>();
  all_layouts<bfloat16, 8, Case>();
  all_layouts<bfloat16, 3, Case>();
  all_layouts<float16, 8, Case>();
  all_layouts<float16, 1, Case>();
}
template <lies A, lies B, class T, int Columns>
struct exactly {
  static void run() {
    for (int depth : {16, 48}) exact_products<A, B, T, Columns>(depth);
  }
};
template <lies A, lies B, class T, int Columns>
struct of_equal_rows {
  static void run() { products_of_equal_rows<A, B, T, Columns>(); }
};

DEVICE_TEST("a product of tiles is exact where all its sums are") { all_products<exactly>(); }
DEVICE_TEST("the bits of a product do not depend on where in a tile it stands") { all_products<of_equal_rows>(); }

// ---- tiles and fragments

template <class T>
void tile_loads(int stride, int offset, index_t valid_rows, index_t valid_columns) {
  constexpr int rows = 16, columns = 32;
  // What lies outside of the valid part must not be read into the tile: it holds NaN.
  std::vector<T> from(std::size_t(rows * stride + offset), T(std::numeric_limits<float>::quiet_NaN()));
  std::vector<double> want(std::size_t(rows * columns));
  for (int r = 0; r < int(valid_rows); ++r)
    for (int c = 0; c < int(valid_columns); ++c) {
      want[std::size_t(r * columns + c)] = r - c;
      from[std::size_t(r * stride + c + offset)] = T(float(r - c));
    }
  device_array<T> const source(from), tile(std::size_t(rows * columns));
  tile_load<T>(source.data() + offset, stride, valid_rows, valid_columns, tile.data(), rows, columns);
  check_close(std::string("tile of ") + type_name<T> + ", " + std::to_string(valid_rows) + " x " +
                  std::to_string(valid_columns) + " valid, offset " + std::to_string(offset) + ", stride " +
                  std::to_string(stride),
              tile.download(), want, 0);
}
template <class T>
void all_tile_loads() {
  for (index_t valid_rows : {16, 5, 0})
    for (index_t valid_columns : {32, 16, 13, 0})
      for (int offset : {0, 1}) tile_loads<T>(40, offset, valid_rows, valid_columns);
  tile_loads<T>(43, 0, 16, 32);
}
DEVICE_TEST("a tile holds the valid part of a matrix and zeros, whatever its alignment") {
  all_tile_loads<float>();
  all_tile_loads<bfloat16>();
  all_tile_loads<float16>();
}

template <class T>
void places() {
  device_array<T> const out(16 * 24);
  fragment_places<T>(out.data());
  std::vector<double> want;
  for (int r = 0; r < 16; ++r)
    for (int c = 0; c < 24; ++c) want.push_back(double(float(T(float(100 * r + c)))));
  check_close(std::string("places of ") + type_name<T>, out.download(), want, 0);
}
DEVICE_TEST("the lanes of a warp hold every element of a fragment once") {
  places<float>();
  places<bfloat16>();
  places<float16>();
}

DEVICE_TEST("the lanes that share a row agree on its sum and maximum") {
  numbers random(3);
  std::vector<float> x;
  for (int i = 0; i < 16 * 24; ++i) x.push_back(float(random.eighths()) - (i < 24 ? 8.0F : 0.0F));
  std::vector<double> sums, maxima;
  for (std::size_t r = 0; r < 16; ++r) {
    double sum = 0, most = -1e9;
    for (std::size_t c = 0; c < 24; ++c) {
      sum += double(x[r * 24 + c]);
      most = std::max(most, double(x[r * 24 + c]));
    }
    sums.push_back(sum), maxima.push_back(most);
  }
  device_array<float> const dx(x), got_sums(16), got_maxima(16);
  fragment_rows(dx.data(), got_sums.data(), got_maxima.data());
  check_close("row sums", got_sums.download(), sums, 0);
  check_close("row maxima", got_maxima.download(), maxima, 0);
}

// ---- sixteen-bit numbers

bool is_nan(float x) { return x != x; }

template <class T>
void widened() {
  device_array<float> const out(65536);
  widen<T>(out.data());
  auto const got = out.download();
  long wrong = 0;
  for (std::size_t i = 0; i < 65536; ++i) {
    T x;
    x.bits = std::uint16_t(i);
    auto const want = float(x);
    wrong += is_nan(want) ? !is_nan(got[i]) : bits_of(got[i]) != bits_of(want);
  }
  check(wrong == 0,
        std::string(type_name<T>) + ": " + std::to_string(wrong) + " of 65536 patterns differ from the host's");
}
DEVICE_TEST("every pattern of sixteen bits is the same float on device and host") {
  widened<bfloat16>();
  widened<float16>();
}

/// All numbers that T stores, those half-way between neighbours, and the floats next to both: every way to round.
template <class T>
std::vector<float> numbers_to_round() {
  std::vector<float> x;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    T low, high;
    low.bits = std::uint16_t(i);
    high.bits = std::uint16_t(i + 1);
    for (float y : {float(low), 0.5F * float(low) + 0.5F * float(high)}) {
      auto const u = bits_of(y);
      for (std::uint32_t near : {u - 1, u, u + 1}) x.push_back(std::bit_cast<float>(near));
    }
  }
  return x;
}
template <class T>
void narrowed() {
  auto const x = numbers_to_round<T>();
  device_array<float> const in(x);
  device_array<std::uint16_t> const out(x.size());
  narrow<T>(in.data(), out.data(), index_t(x.size()));
  auto const got = out.download();
  long wrong = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    T stored;
    stored.bits = got[i];
    bool const same = is_nan(x[i]) ? is_nan(float(stored)) : got[i] == T(x[i]).bits;
    if (!same && wrong++ == 0)
      std::printf("  the first: %a becomes %04x, on the host %04x\n", double(x[i]), unsigned(got[i]),
                  unsigned(T(x[i]).bits));
  }
  check(wrong == 0, std::string(type_name<T>) + ": " + std::to_string(wrong) + " of " + std::to_string(x.size()) +
                        " numbers are rounded unlike the host's");
}
DEVICE_TEST("device and host round every float near a stored number, or half-way between two, alike") {
  narrowed<bfloat16>();
  narrowed<float16>();
}

// ---- rows and views

void check_places(std::string const& what, sequences const& seq, index_t const* offsets) {
  auto const n = std::size_t(seq.count());
  device_array<index_t> const begins(n), lengths(n);
  places_of(seq, offsets, false, begins.data(), lengths.data());
  auto const b = begins.download(), l = lengths.download();
  for (std::size_t i = 0; i < n; ++i)
    check(b[i] == seq.begin(index_t(i)) && l[i] == seq.length(index_t(i)),
          what + ": sequence " + std::to_string(i) + " is elsewhere in device code");
}
DEVICE_TEST("device code finds the rows of batches and of packed sequences, empty ones too") {
  check_places("batch", sequences::batch(3, 7), nullptr);
  check_places("no sequence", sequences::batch(0, 7), nullptr);
  check_places("sequences without tokens", sequences::batch(2, 0), nullptr);
  std::vector<index_t> const offsets{0, 0, 5, 6, 6, 40, 40};
  device_array<index_t> const copy(offsets);
  check_places("packed", sequences::packed(offsets), copy.data());
}
DEVICE_TEST("packed sequences without offsets in device memory are refused, but not in a dry run") {
  std::vector<index_t> const offsets{0, 3, 4};
  auto const seq = sequences::packed(offsets);
  bool refused = false;
  try {
    places_of(seq, nullptr, false, nullptr, nullptr);
  } catch (value_error const& e) {
    refused = std::string(e.what()).find("device::cuda::offsets") != std::string::npos;
  }
  check(refused, "packed sequences without device::cuda::offsets were not refused");
  places_of(seq, nullptr, true, nullptr, nullptr);
}
DEVICE_TEST("device code follows the strides of views, offsets beyond 32 bits included") {
  constexpr index_t R = 3, H = 2, C = 5;
  std::vector<float> x(4 * 32), g(R * 8), zero(std::size_t(R) * 64, 0.0F);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = float(i);
  for (std::size_t i = 0; i < g.size(); ++i) g[i] = float(1000 * i);
  device_array<float> const dx(x), dg(g), dout(zero);
  view3<float const> const x_rhc(dx.data(), {R, H, C}, {32, 11, 1});
  view2<float const> const g_rh(dg.data(), {R, H}, {8, 3});
  view3<float> const o_rhc(dout.data(), {R, H, C}, {64, 20, 1});
  add_through_views(x_rhc, g_rh, o_rhc);
  std::vector<double> want(zero.size());
  for (std::size_t r = 0; r < R; ++r)
    for (std::size_t h = 0; h < H; ++h)
      for (std::size_t c = 0; c < C; ++c)
        want[r * 64 + h * 20 + c] = double(x[r * 32 + h * 11 + c] + g[r * 8 + h * 3]);
  check_close("through views", dout.download(), want, 0);

  // Two rows 2^33 numbers apart, of which only the second one exists.
  constexpr index_t apart = index_t(1) << 33;
  auto const before = []<class T>(T* p) {
    return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(p) - std::uintptr_t(apart) * sizeof(T));
  };
  device_array<float> const far{std::size_t(C)};
  add_through_views({before(dx.data()), {2, 1, C}, {apart, 0, 1}}, {before(dg.data() + 1), {2, 1}, {apart, 0}},
                    {before(far.data()), {2, 1, C}, {apart, 0, 1}}, 1);
  want = {1000, 1001, 1002, 1003, 1004};
  check_close("rows 2^33 numbers apart", far.download(), want, 0);
}

// ---- launches

std::vector<int> counted(std::vector<int> const& counts, bool dry, index_t x, index_t y, int threads,
                         std::size_t shared_bytes) {
  device_array<int> const memory(counts);
  count_up(dry, x, y, threads, shared_bytes, memory.data());
  return memory.download();
}
DEVICE_TEST("every thread of a grid runs once; an empty grid and a dry run start nothing") {
  std::vector<int> const none(6 * 64, 0), ones(6 * 64, 1);
  check(counted(none, false, 3, 2, 64, 256) == ones, "a grid of 3 x 2 blocks");
  check(counted(none, false, 0, 2, 64, 256) == none, "no block along x");
  check(counted(none, false, 3, 0, 64, 256) == none, "no block along y");
  check(counted(none, true, 3, 2, 64, 256) == none, "a dry run");
}
DEVICE_TEST("shared memory beyond 48 KiB is had by asking for it") {
  check(counted(std::vector<int>(64), false, 1, 1, 64, 100 * 1024) == std::vector<int>(64, 1), "100 KiB");
}

template <class Call>
void check_refused(std::string const& what, std::string const& expected, Call const& call) {
  std::string said = "nothing";
  try {
    call();
  } catch (device_error const& e) {
    said = e.what();
  }
  check(said.find(expected) != std::string::npos,
        what + ": expected a device_error with '" + expected + "', got " + said);
}
DEVICE_TEST("a launch that the device refuses is an error that names the kernel, and the next one works") {
  std::vector<int> const none(64, 0), ones(64, 1);
  device_array<int> const memory(none);
  auto const tried = [&](index_t x, index_t y, int threads, std::size_t shared) {
    count_up(false, x, y, threads, shared, memory.data());
  };
  check_refused("4096 threads", "seqmix: count up: the CUDA runtime reports", [&] { tried(1, 1, 4096, 256); });
  check(counted(none, false, 1, 1, 64, 256) == ones, "the launch behind one of too many threads");
  check_refused("16 MiB of shared memory", "seqmix: count up: the CUDA runtime reports",
                [&] { tried(1, 1, 64, 16 << 20); });
  check(counted(none, false, 1, 1, 64, 256) == ones, "the launch behind one of too much shared memory");
  check_refused("70000 blocks along y", "a grid of 1 x 70000 x 1 blocks", [&] { tried(1, 70000, 64, 256); });
  check_refused("2^31 blocks along x", "a grid of 2147483648 x 1 x 1 blocks",
                [&] { tried(index_t(1) << 31, 1, 64, 256); });
  check(memory.download() == none, "a refused launch wrote something");
}

}  // namespace
