#pragma once

#include <numeric>

#include <seqmix/kernels/cpu/recurrence_chunkwise.hpp>

/// What the recurrence over channels (recurrence_channels.hpp) is made of: how heads are cut into blocks, what its
/// inputs look like, its scratch and its exponential.
namespace seqmix::inline v0::kernels::detail {

/// How the heads are cut: blocks of about 128 channels (256 when each is one number) that are computed together,
/// units of one or more blocks that run in parallel. Heads that share values or gates stay in one unit; the cut
/// follows from the shape alone.
template <class Isa, class T>
struct channel_blocks {
  static constexpr index_t sequence_groups = 32;
  index_t heads, unit_heads, units, blocks_of_unit;
  index_t lanes;   ///< channels of a block, in whole vectors
  index_t row;     ///< of a block's scratch: one vector more, so that rows do not meet in the same cache sets
  index_t groups;  ///< of consecutive sequences; sums over rows are added group by group

  explicit channel_blocks(recurrence_shape const& s) {
    index_t const run = s.heads / (std::max)(index_t(1), std::gcd(s.value_heads, s.gate_heads));
    index_t const channels = s.key_dim > 1 ? 128 : 256;
    heads = (std::max)(index_t(1), (std::min)(s.heads, channels / (std::max)(index_t(1), s.value_dim)));
    if (0 < run && run <= heads) heads = heads / run * run;
    unit_heads = (std::max)(heads, run);
    units = (s.heads + unit_heads - 1) / unit_heads;
    blocks_of_unit = (unit_heads + heads - 1) / heads;
    lanes = simd::padded<Isa, T>(heads * s.value_dim);
    row = lanes + Isa::template lanes<T>;
    groups = (std::min)(s.seq.count(), sequence_groups);
  }
  index_t blocks() const noexcept { return units * blocks_of_unit; }
  index_t unit_begin(index_t unit) const noexcept { return unit * unit_heads; }
  index_t unit_end(recurrence_shape const& s, index_t unit) const noexcept {
    return (std::min)(s.heads, (unit + 1) * unit_heads);
  }
  index_t group_begin(recurrence_shape const& s, index_t group) const noexcept {
    return group * s.seq.count() / groups;
  }
  struct range {
    index_t begin, end;
  };
  range block(recurrence_shape const& s, index_t block) const noexcept {
    index_t const unit = block / blocks_of_unit, begin = unit_begin(unit) + block % blocks_of_unit * heads;
    return {begin, (std::min)(begin + heads, unit_end(s, unit))};
  }
  /// Whether every block lies within one group of heads that share something.
  bool reads_one(recurrence_shape const& s, index_t sharing) const noexcept {
    return sharing == 1 || (s.heads / sharing % heads == 0 && unit_heads == heads);
  }
};

/// What forward keeps for backward: the state before every chunk, [chunks, blocks, K, lanes].
/// Bytes: K H V sizeof(T) a chunk, H V rounded up to whole vectors.
template <class Isa, class T>
recurrence_saved<T> channel_saved(arena& a, recurrence_shape const& s) {
  channel_blocks<Isa, T> const cut(s);
  return {a.take<T>(s.chunks_before(s.seq.count()) * cut.blocks() * s.key_dim * cut.lanes)};
}

/// Whose queries and keys a lane reads.
enum class key_source {
  none,    ///< there are none: 1
  shared,  ///< one head's for all lanes of a block
  own      ///< those of the lane's own heads
};

/// What is known of an input before its numbers are.
template <class T>
struct channel_form {
  key_source keys;
  bool rated, per_key, constant;

  template <class Isa>
  channel_form(channel_blocks<Isa, T> const& cut, recurrence_shape const& s, recurrence_input<T> const& in)
      : keys(source(cut, s, in)), rated(in.rate_hk.extent[1] > 0), per_key(in.g_rhk.extent[2] > 1),
        constant(in.g_rhk.extent[2] > 0 && in.g_rhk.stride[0] == 0) {}

 private:
  template <class Isa>
  static key_source source(channel_blocks<Isa, T> const& cut, recurrence_shape const& s,
                           recurrence_input<T> const& in) {
    if ((in.q_rhk.extent[2] == 0) != (in.k_rhk.extent[2] == 0))
      throw shape_error("seqmix: recurrence: expected both queries and keys, or neither; got only one");
    if (in.k_rhk.extent[2] == 0) return key_source::none;
    return cut.reads_one(s, s.query_heads) && cut.reads_one(s, s.key_heads) ? key_source::shared : key_source::own;
  }
};

/// 2^x for x <= 0 without what only other arguments need; 0 where the result is no normal number (also for -inf),
/// exactly 1 for 0, NaN stays NaN. On |r| <= 1/2, 2^r = 1 + r q(r) with the q of nearly least greatest error;
/// relative error of the whole below 1.5 units in the last place.
template <class Isa, class T>
SEQMIX_INLINE simd::vec<Isa, T> decay_factor(simd::vec<Isa, T> const& x) noexcept {
  using unsigned_integer = std::make_unsigned_t<simd::integer_of<T>>;
  using bits = typename simd::vector_of<unsigned_integer, Isa::template lanes<T>>::type;
  constexpr bool single = sizeof(T) == 4;
  constexpr T magic = single ? T(12582912.0) : T(6755399441055744.0);
  constexpr T lowest = single ? T(-126) : T(-1022);
  constexpr int mantissa = single ? 23 : 52;
  constexpr unsigned_integer one = unsigned_integer(single ? 127 : 1023) << mantissa;
  auto const shifted = x + magic;
  auto const r = x - (shifted - magic);
  simd::vec<Isa, T> p;
  if constexpr (single) {
    p = T(0.00015453162945120691) * r + T(0.0013390863364671234);
    p = p * r + T(0.0096180825572778524);
    p = p * r + T(0.055503571142190782);
    p = p * r + T(0.24022650760568126);
    p = p * r + T(0.69314718802622877);
  } else {
    p = T(4.4549605981865186e-10) * r + T(7.0725859492692234e-09);
    p = p * r + T(1.0178062445845774e-07);
    p = p * r + T(1.3215442587921689e-06);
    p = p * r + T(1.5252733829836119e-05);
    p = p * r + T(0.0001540353044173605);
    p = p * r + T(0.0013333558146416936);
    p = p * r + T(0.0096181291076068882);
    p = p * r + T(0.055504108664821597);
    p = p * r + T(0.24022650695910097);
    p = p * r + T(0.69314718055994529);
  }
  p = p * r + T(1);
  // The whole part of x sits in the low bits of `shifted`, whose other bits are shifted out: those of `magic` do
  // not reach the exponent either.
  auto const power = std::bit_cast<simd::vec<Isa, T>>((std::bit_cast<bits>(shifted) << mantissa) + one);
  auto const result = p * power;
  return x < lowest ? simd::vec<Isa, T>{} : result;
}

/// Keys whose states stay in registers while a chunk's tokens pass.
template <class Isa>
inline constexpr int keys_together = Isa::registers >= 32 ? 4 : 2;

/// One thread's memory: C tokens of a block's channels, and of a strip what has keys.
template <class Isa, class T>
struct channel_scratch {
  T *S, *v, *written, *o, *g, *write, *rate, *binary_rate, *q, *k, *factor;
  T *history, *dS, *dout, *dv, *dg, *dg_keys, *dq, *dk, *d_rate;
  double *d_rate_sum, *d_constant_sum;

  static channel_scratch carve(arena& a, recurrence_shape const& s, channel_form<T> const& form, bool backward) {
    index_t const C = s.chunk, K = s.key_dim, L = channel_blocks<Isa, T>(s).row;
    index_t const tile = C * keys_together<Isa> * Isa::template lanes<T>;
    // Sizes are powers of two as a rule: without the gap the same token of all arrays would fall into one cache
    // set.
    auto const take = [&](index_t count) { return a.take<T>(count + index_t(320 / sizeof(T))); };
    channel_scratch m{};
    for (T** p : {&m.S, &m.rate, &m.binary_rate}) *p = take(K * L);
    for (T** p : {&m.v, &m.written, &m.o, &m.g, &m.write}) *p = take(C * L);
    index_t const numbers = form.keys == key_source::none ? 0 : form.keys == key_source::shared ? C * K : tile;
    for (T** p : {&m.q, &m.k}) *p = take(numbers);
    m.factor = take(tile);
    if (!backward) return m;
    m.history = take(tile + tile / C);
    for (T** p : {&m.dS, &m.d_rate}) *p = take(K * L);
    for (T** p : {&m.dout, &m.dv, &m.dg}) *p = take(C * L);
    for (T** p : {&m.dq, &m.dk}) *p = take(numbers > 0 ? tile : 0);
    m.dg_keys = take(form.per_key ? tile : 0);
    for (double** p : {&m.d_rate_sum, &m.d_constant_sum}) *p = a.take<double>(K * L);
    return m;
  }
};

}  // namespace seqmix::inline v0::kernels::detail
