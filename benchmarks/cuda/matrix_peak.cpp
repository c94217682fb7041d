#include "device.hpp"

#if defined(SEQMIX_CUBLASLT)

#include <algorithm>
#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "measure.hpp"

namespace seqmix::benchmarks {

double matrix_peak(index_t n, int repetitions) {
  auto const side = std::uint64_t(n);
  constexpr std::size_t workspace_bytes = std::size_t(64) << 20;
  device_block memory(3 * side * side * 2 + workspace_bytes);
  auto* const a = memory.at<bfloat16>(0);
  auto *const b = a + n * n, *const c = b + n * n;
  void* const workspace = c + n * n;
  fill_normal(a, n * n, 1, 1.0F);
  fill_normal(b, n * n, 2, 1.0F);

  cublasLtHandle_t handle{};
  cublasLtMatmulDesc_t product{};
  cublasLtMatrixLayout_t layout{};
  cublasLtMatmulPreference_t preference{};
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  cublasOperation_t const transposed = CUBLAS_OP_T;
  // Both factors with their depth contiguous, what the hardware likes best.
  bool const ready =
      cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS &&
      cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
      cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) ==
          CUBLAS_STATUS_SUCCESS &&
      cublasLtMatrixLayoutCreate(&layout, CUDA_R_16BF, side, side, std::int64_t(n)) == CUBLAS_STATUS_SUCCESS &&
      cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS &&
      cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                           sizeof workspace_bytes) == CUBLAS_STATUS_SUCCESS &&
      cublasLtMatmulAlgoGetHeuristic(handle, product, layout, layout, layout, layout, preference, 1, &found,
                                     &count) == CUBLAS_STATUS_SUCCESS &&
      count == 1;
  double seconds = 0;
  if (ready) {
    float const one = 1.0F, zero = 0.0F;
    bool accepted = true;
    seconds = best_seconds(repetitions, [&] {
      accepted =
          accepted && cublasLtMatmul(handle, product, &one, a, layout, b, layout, &zero, c, layout, c, layout,
                                     &found.algo, workspace, workspace_bytes, nullptr) == CUBLAS_STATUS_SUCCESS;
    });
    if (!accepted) seconds = 0;
  }
  if (preference) cublasLtMatmulPreferenceDestroy(preference);
  if (layout) cublasLtMatrixLayoutDestroy(layout);
  if (product) cublasLtMatmulDescDestroy(product);
  if (handle) cublasLtDestroy(handle);
  return seconds > 0 ? 2.0 * double(n) * double(n) * double(n) / seconds : 0;
}

}  // namespace seqmix::benchmarks

#else

namespace seqmix::benchmarks {
double matrix_peak(index_t, int) { return 0; }
}  // namespace seqmix::benchmarks

#endif
