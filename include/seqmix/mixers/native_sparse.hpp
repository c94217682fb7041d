#pragma once

#include <seqmix/mixers/gated_sum.hpp>

namespace seqmix::inline v0 {

/// Native sparse attention: o = g_cmp o_cmp + g_slc o_slc + g_swa o_swa, the gates handed in as mix [R,H,3] in this
/// order. Compression reads the means of complete chunks; selection reads the tokens of the own chunk and of the
/// top_k best others by the compression's weights, added up over the query heads of a key head; the window reads
/// the last tokens. select.chunk is the block size (64), select.top_k the block count without the own block (15 of
/// 16), select.window the window (512). Source: arXiv 2502.11089, equations 5 to 12, with mean pooling;
/// first_and_previous forces block 0 and the one before the own, none leaves all but the own to the weights.
template <forced_chunks Forced = forced_chunks::first_and_previous>
using native_sparse = gated_sum<attention<selectors::compressed>,
                                attention<selectors::top_k_by_compression<Forced>>, attention<selectors::window>>;

}  // namespace seqmix::inline v0
