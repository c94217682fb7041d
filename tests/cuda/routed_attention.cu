#include <seqmix/kernels/cuda/routed_attention.cuh>
#include <seqmix/selectors/chunks.hpp>

using namespace seqmix;
using namespace seqmix::selectors;
using enum chunk_score;
using enum chunk_gradient;

// Those of the stored cases.
#define OWN(...) template struct seqmix::kernels::cuda_routed_attention<own_plus_top1<__VA_ARGS__>, float>
#define ONE(...) template struct seqmix::kernels::cuda_routed_attention<exactly_one<__VA_ARGS__>, float>
#define NEAR(...) template struct seqmix::kernels::cuda_routed_attention<window_plus_top1<__VA_ARGS__>, float>
OWN(mean_key);
OWN(mean_key, gated);
OWN(exact_mass);
OWN(exact_mass, chunk_straight_through);
OWN(exact_max);
ONE(mean_key_prefix);
ONE(mean_key_prefix, chunk_straight_through);
ONE(mean_key_prefix, chunk_straight_through, chunk_probability::score);
ONE(mean_key_prefix, gated);
ONE(exact_mass);
ONE(exact_mass, chunk_straight_through);
ONE(exact_mass, gated);
ONE(exact_max);
ONE(exact_max, chunk_straight_through);
ONE(exact_max, gated);
NEAR(mean_key);
NEAR(mean_key, gated);
NEAR(exact_mass);
NEAR(exact_mass, chunk_straight_through);
NEAR(exact_max);

#define OWN_K(...) template struct seqmix::kernels::cuda_routed_attention<own_plus_top_k<__VA_ARGS__>, float>
#define NEAR_K(...) template struct seqmix::kernels::cuda_routed_attention<window_plus_top_k<__VA_ARGS__>, float>
OWN_K(mean_key);
OWN_K(mean_key, gated);
OWN_K(exact_mass, chunk_straight_through);
NEAR_K(exact_max, gated);
NEAR_K(mean_key, chunk_straight_through, chunk_probability::score);
