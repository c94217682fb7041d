#pragma once

#include <utility>

#include <seqmix/kernels/cpu/simd.hpp>

/// A matrix that changes from token to token by decays and outer products while rows are read from it:
///   S[i][c] = f S[i][c] + the sum over writes of row_i lane_c,     to_c += row_i S[i][c]  (before or after)
/// Every pass of the linear recurrences is this, forward and backward, with tokens in either direction and lanes
/// that are value channels or key channels. On a CPU it beats products between tokens: the state never leaves the
/// registers (strips) or the first cache (passes), and no later token meets an earlier one.
/// An element's bits do not depend on how the matrix is cut.
namespace seqmix::inline v0::kernels::detail {

/// Which side of the matrix has decays of its own.
enum class decay_axis { rows, lanes };

/// Numbers of one token after the other, `step` apart (negative: backwards in time).
template <class T>
struct token_rows {
  T const* data;
  index_t step;
  T const* at(index_t t) const noexcept { return data + t * step; }
};
template <class T>
struct strip_write {
  token_rows<T> row, lane;
};
/// What is read is added to `to`.
template <class T>
struct strip_read {
  token_rows<T> row;
  T* to;
  index_t step;
};

/// One walk over tokens: decays, writes, and reads of the state before (`Old`) and after (`New`) each token's step.
template <class T, decay_axis Decay, int Writes, int Old, int New>
struct strip_walk {
  static constexpr decay_axis decay_by = Decay;
  static constexpr int writes = Writes, old_reads = Old, new_reads = New, reads = Old + New;
  token_rows<T> decay;
  strip_write<T> write[std::size_t(Writes + (Writes == 0))];
  strip_read<T> read[std::size_t(Old + New + (Old + New == 0))];  ///< the old ones first
};

/// Where a walk stands: pointers of one token, for the strip that begins at a row and a lane.
template <class T, int Writes, int Reads>
struct strip_pointers {
  T const* decay;
  T const *row[std::size_t(Writes + (Writes == 0))], *lane[std::size_t(Writes + (Writes == 0))];
  T const* reader[std::size_t(Reads + (Reads == 0))];
  T* to[std::size_t(Reads + (Reads == 0))];

  template <decay_axis Decay, int Old, int New>
  SEQMIX_INLINE strip_pointers(strip_walk<T, Decay, Writes, Old, New> const& walk, index_t first_row,
                               index_t first_lane, index_t t) noexcept {
    decay = walk.decay.at(t) + (Decay == decay_axis::rows ? first_row : first_lane);
    SEQMIX_UNROLL(4)
    for (int n = 0; n < Writes; ++n) {
      row[n] = walk.write[n].row.at(t) + first_row;
      lane[n] = walk.write[n].lane.at(t) + first_lane;
    }
    SEQMIX_UNROLL(4)
    for (int n = 0; n < Reads; ++n) {
      reader[n] = walk.read[n].row.at(t) + first_row;
      to[n] = walk.read[n].to + t * walk.read[n].step + first_lane;
    }
  }
};

/// One token's step of one vector of the matrix.
template <class Isa, decay_axis Decay, int Writes, int Old, int Reads, class T, class V>
SEQMIX_INLINE V strip_step(V x, strip_pointers<T, Writes, Reads> const& at, V const& decay, V const* lanes, V* sums,
                           index_t i, index_t vectors) noexcept {
  SEQMIX_UNROLL(4)
  for (int n = 0; n < Old; ++n) sums[n * vectors] += x * at.reader[n][i];
  V written{};
  SEQMIX_UNROLL(4)
  for (int n = 0; n < Writes; ++n)
    written = n == 0 ? lanes[0] * at.row[0][i] : written + lanes[n * vectors] * at.row[n][i];
  if constexpr (Decay == decay_axis::rows)
    x = x * at.decay[i] + written;
  else
    x = x * decay + written;
  SEQMIX_UNROLL(4)
  for (int n = Old; n < Reads; ++n) sums[n * vectors] += x * at.reader[n][i];
  return x;
}

/// Whether a strip's matrices are kept for another walk to meet.
enum class strip_history {
  none,
  keep,  ///< the matrix before every token's step is stored
  meet   ///< sums over rows of what was stored times the matrix after the step
};
/// A strip's matrices of one token after the other, and where the sums go when they are met.
template <class T>
struct strip_past {
  T* states = nullptr;
  index_t step = 0;
  T* met = nullptr;
  index_t met_step = 0;
};

template <class Isa>
inline constexpr int strip_rows = Isa::registers >= 32 ? 8 : 4;
inline constexpr int strip_vectors = 2;

/// Rows x Vectors of the matrix, held in registers over all tokens.
template <class Isa, int Rows, int Vectors, strip_history History, class T, decay_axis Decay, int Writes, int Old,
          int New>
void register_strip(index_t tokens, strip_walk<T, Decay, Writes, Old, New> const& walk, index_t row, index_t lane,
                    T* matrix, index_t stride, strip_past<T> past) noexcept {
  using V = simd::vec<Isa, T>;
  constexpr index_t w = Isa::template lanes<T>;
  constexpr int reads = Old + New;
  V S[std::size_t(Rows)][std::size_t(Vectors)];
  SEQMIX_UNROLL(8)
  for (int i = 0; i < Rows; ++i) {
    SEQMIX_UNROLL(4)
    for (int c = 0; c < Vectors; ++c) S[i][c] = simd::load<Isa>(matrix + (row + i) * stride + lane + c * w);
  }
  for (index_t t = 0; t < tokens; ++t) {
    strip_pointers<T, Writes, reads> const at(walk, row, lane, t);
    T* const state = past.states + t * past.step;
    T* const met = past.met + t * past.met_step + lane;
    V decays[std::size_t(Vectors)], lanes[std::size_t((Writes + (Writes == 0)) * Vectors)],
        sums[std::size_t((reads + (reads == 0)) * Vectors)], met_sums[std::size_t(Vectors)];
    SEQMIX_UNROLL(4)
    for (int c = 0; c < Vectors; ++c) {
      if constexpr (Decay == decay_axis::lanes) decays[c] = simd::load<Isa>(at.decay + c * w);
      if constexpr (History == strip_history::meet) met_sums[c] = simd::load<Isa>(met + c * w);
      SEQMIX_UNROLL(4)
      for (int n = 0; n < Writes; ++n) lanes[n * Vectors + c] = simd::load<Isa>(at.lane[n] + c * w);
      SEQMIX_UNROLL(4)
      for (int n = 0; n < reads; ++n) sums[n * Vectors + c] = simd::load<Isa>(at.to[n] + c * w);
    }
    SEQMIX_UNROLL(8)
    for (int i = 0; i < Rows; ++i) {
      SEQMIX_UNROLL(4)
      for (int c = 0; c < Vectors; ++c) {
        if constexpr (History == strip_history::keep) simd::store<Isa>(state + (i * Vectors + c) * w, S[i][c]);
        S[i][c] = strip_step<Isa, Decay, Writes, Old>(S[i][c], at, decays[c], lanes + c, sums + c, i, Vectors);
        if constexpr (History == strip_history::meet)
          met_sums[c] += simd::load<Isa>(state + (i * Vectors + c) * w) * S[i][c];
      }
    }
    SEQMIX_UNROLL(4)
    for (int c = 0; c < Vectors; ++c) {
      if constexpr (History == strip_history::meet) simd::store<Isa>(met + c * w, met_sums[c]);
      SEQMIX_UNROLL(4)
      for (int n = 0; n < reads; ++n) simd::store<Isa>(at.to[n] + c * w, sums[n * Vectors + c]);
    }
  }
  SEQMIX_UNROLL(8)
  for (int i = 0; i < Rows; ++i) {
    SEQMIX_UNROLL(4)
    for (int c = 0; c < Vectors; ++c) simd::store<Isa>(matrix + (row + i) * stride + lane + c * w, S[i][c]);
  }
}

/// f(first row, first lane, how many rows and vectors as constants) for every strip of a matrix. `lanes` is a
/// multiple of the vector length.
template <class Isa, class T, class F>
SEQMIX_INLINE void for_strips(index_t rows, index_t lanes, F const& f) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  auto const columns = [&](index_t lane, auto vectors) {
    index_t row = 0;
    for (; row + strip_rows<Isa> <= rows; row += strip_rows<Isa>)
      f(row, lane, std::integral_constant<int, strip_rows<Isa>>{}, vectors);
    for (; row < rows; ++row) f(row, lane, std::integral_constant<int, 1>{}, vectors);
  };
  index_t lane = 0;
  for (; lane + strip_vectors * w <= lanes; lane += strip_vectors * w)
    columns(lane, std::integral_constant<int, strip_vectors>{});
  for (; lane < lanes; lane += w) columns(lane, std::integral_constant<int, 1>{});
}

/// Walks a matrix [rows, stride] through `tokens` tokens.
template <class Isa, class T, decay_axis Decay, int Writes, int Old, int New>
void walk_strips(index_t tokens, strip_walk<T, Decay, Writes, Old, New> const& walk, index_t rows, index_t lanes,
                 T* matrix, index_t stride) noexcept {
  for_strips<Isa, T>(rows, lanes, [&](index_t row, index_t lane, auto strip, auto vectors) {
    register_strip<Isa, strip(), vectors(), strip_history::none>(tokens, walk, row, lane, matrix, stride, {});
  });
}

/// One token for all rows of `Vectors` columns, the state in memory: for what a token writes depends on what it
/// reads. The sums start at zero.
template <class Isa, int Vectors, class T, int Writes, int Old, int New>
SEQMIX_INLINE void pass_columns(strip_walk<T, decay_axis::rows, Writes, Old, New> const& walk, index_t t,
                                index_t rows, index_t lane, T* matrix, index_t stride) noexcept {
  using V = simd::vec<Isa, T>;
  constexpr index_t w = Isa::template lanes<T>;
  constexpr int reads = Old + New;
  strip_pointers<T, Writes, reads> const at(walk, 0, lane, t);
  V lanes[std::size_t((Writes + (Writes == 0)) * Vectors)],
      sums[std::size_t((reads + (reads == 0)) * Vectors)] = {};
  SEQMIX_UNROLL(4)
  for (int n = 0; n < Writes; ++n) {
    SEQMIX_UNROLL(4)
    for (int c = 0; c < Vectors; ++c) lanes[n * Vectors + c] = simd::load<Isa>(at.lane[n] + c * w);
  }
  matrix += lane;
  for (index_t i = 0; i < rows; ++i) {
    SEQMIX_UNROLL(4)
    for (int c = 0; c < Vectors; ++c)
      simd::store<Isa>(matrix + i * stride + c * w,
                       strip_step<Isa, decay_axis::rows, Writes, Old>(simd::load<Isa>(matrix + i * stride + c * w),
                                                                      at, V{}, lanes + c, sums + c, i, Vectors));
  }
  SEQMIX_UNROLL(4)
  for (int n = 0; n < reads; ++n) {
    SEQMIX_UNROLL(4)
    for (int c = 0; c < Vectors; ++c) simd::store<Isa>(at.to[n] + c * w, sums[n * Vectors + c]);
  }
}

/// f(first lane, how many vectors as a constant) for all lanes.
template <class Isa, class T, class F>
SEQMIX_INLINE void for_columns(index_t lanes, F const& f) noexcept {
  constexpr index_t w = Isa::template lanes<T>;
  constexpr int most = Isa::registers >= 32 ? 4 : 2;
  index_t lane = 0;
  for (; lane + most * w <= lanes; lane += most * w) f(lane, std::integral_constant<int, most>{});
  for (; lane < lanes; lane += w) f(lane, std::integral_constant<int, 1>{});
}

}  // namespace seqmix::inline v0::kernels::detail
