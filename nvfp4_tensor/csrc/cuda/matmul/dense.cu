// cuBLASLt takes alpha from device memory, adds a bias to the float32 sums and rounds them once: torch's own products
// round before alpha, or leave float32 sums for a kernel of ours to finish (4 bytes of each written and read again).
//
// It is found in the process, where torch has it; its headers need not be there when this is built. Declared here is
// what is used of its interface, which is the same in versions 12 and 13.
#include "cuda/matmul/dense.h"

#include <dlfcn.h>
#include <library_types.h>

#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <type_traits>

namespace nvfp4 {
namespace {

// --- cuBLASLt --------------------------------------------------------------------------------------------------------

using Object = void*;                         // a handle, descriptor, layout or preference
constexpr int kSuccess = 0, kFloatSums = 68;  // CUBLAS_STATUS_SUCCESS, CUBLAS_COMPUTE_32F
// attributes of a product's descriptor, and values
constexpr int kPointerMode = 2, kOperationOfA = 3, kEpilogue = 7, kBiasPointer = 8;
constexpr int32_t kDeviceScalars = 1, kAlphaVectorBetaZero = 3, kTranspose = 1, kAddBias = 4;
// attributes of a preference, and a value: partial sums are added in float32
constexpr int kMostWorkspace = 1, kReductions = 3, kAlignmentOfB = 6, kAlignmentOfC = 7, kAlignmentOfD = 8;
constexpr uint32_t kFloatReductions = 2;

struct Choice {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

struct Library {
  int (*create)(Object*);
  int (*create_product)(Object*, int compute_type, int scale_type);
  int (*set_product)(Object, int attribute, const void* value, size_t bytes);
  int (*destroy_product)(Object);
  int (*create_layout)(Object*, int type, uint64_t rows, uint64_t columns, int64_t step);
  int (*destroy_layout)(Object);
  int (*create_preference)(Object*);
  int (*set_preference)(Object, int attribute, const void* value, size_t bytes);
  int (*destroy_preference)(Object);
  int (*choose)(Object, Object product, Object a, Object b, Object c, Object d, Object preference, int most, Choice*,
                int* found);
  int (*multiply)(Object, Object product, const void* alpha, const void* a, Object a_layout, const void* b,
                  Object b_layout, const void* beta, const void* c, Object c_layout, void* d, Object d_layout,
                  const uint64_t* algorithm, void* workspace, size_t workspace_bytes, cudaStream_t stream);

  static const Library* found() {
    static const std::optional<Library> library = find();
    return library ? &*library : nullptr;
  }

 private:
  static std::optional<Library> find() {
    void* loaded = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (!loaded) loaded = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
    }
    if (!loaded) return std::nullopt;
    Library l{};
    bool all = true;
    const auto look_up = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(loaded, name));
      all = all && function;
    };
    look_up(l.create, "cublasLtCreate");
    look_up(l.create_product, "cublasLtMatmulDescCreate");
    look_up(l.set_product, "cublasLtMatmulDescSetAttribute");
    look_up(l.destroy_product, "cublasLtMatmulDescDestroy");
    look_up(l.create_layout, "cublasLtMatrixLayoutCreate");
    look_up(l.destroy_layout, "cublasLtMatrixLayoutDestroy");
    look_up(l.create_preference, "cublasLtMatmulPreferenceCreate");
    look_up(l.set_preference, "cublasLtMatmulPreferenceSetAttribute");
    look_up(l.destroy_preference, "cublasLtMatmulPreferenceDestroy");
    look_up(l.choose, "cublasLtMatmulAlgoGetHeuristic");
    look_up(l.multiply, "cublasLtMatmul");
    return all ? std::optional(l) : std::nullopt;
  }
};

// One a device, for all threads; they stay. Null where it cannot be made now.
Object handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, Object> handles;
  const std::lock_guard lock(mutex);
  Object& handle = handles[device];
  if (!handle) {
    // It allocates, which a capture that is under way would forbid this thread.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (Library::found()->create(&handle) != kSuccess) handle = nullptr;
    cudaThreadExchangeStreamCaptureMode(&mode);
  }
  return handle;
}

// --- products --------------------------------------------------------------------------------------------------------

// Everything that cuBLASLt chooses by. It counts in columns: y^T (N, M) = op(w^T) x^T.
struct Shape {
  int device, M, N, K;
  int64_t x_row, y_row;
  bool along_rows, alpha_per_row, has_bias;
  uint32_t x_alignment, y_alignment;
  Dtype dtype;

  auto key() const {
    return std::tie(device, M, N, K, x_row, y_row, along_rows, alpha_per_row, has_bias, x_alignment, y_alignment,
                    dtype);
  }
  bool operator<(const Shape& other) const { return key() < other.key(); }
};

constexpr uint32_t kAllocated = 256;  // bytes to which w is aligned, as cuBLASLt assumes of all

uint32_t alignment_of(const void* at) {
  uint32_t alignment = kAllocated;
  while (reinterpret_cast<uintptr_t>(at) % alignment) alignment /= 2;
  return alignment;
}

__device__ const float kZero = 0;

class Product {
 public:
  Product(const Library& library, Object handle, const Shape& s) : library_(library), handle_(handle) {
    const int type = s.dtype == Dtype::kBf16 ? CUDA_R_16BF : CUDA_R_16F;
    const int64_t w_rows = s.along_rows ? s.K : s.N, w_columns = s.along_rows ? s.N : s.K;
    const int32_t mode = s.alpha_per_row ? kAlphaVectorBetaZero : kDeviceScalars;
    Object preference = nullptr;
    const uint64_t most_workspace = 32 << 20;
    bool ok = cudaGetSymbolAddress(&zero_, kZero) == cudaSuccess &&
              library.create_product(&product_, kFloatSums, CUDA_R_32F) == kSuccess &&
              library.set_product(product_, kPointerMode, &mode, sizeof mode) == kSuccess &&
              library.create_layout(&w_, type, w_rows, w_columns, w_rows) == kSuccess &&
              library.create_layout(&x_, type, s.K, s.M, s.x_row) == kSuccess &&
              library.create_layout(&y_, type, s.N, s.M, s.y_row) == kSuccess &&
              library.create_preference(&preference) == kSuccess &&
              library.set_preference(preference, kMostWorkspace, &most_workspace, sizeof most_workspace) == kSuccess &&
              library.set_preference(preference, kReductions, &kFloatReductions, sizeof(uint32_t)) == kSuccess &&
              library.set_preference(preference, kAlignmentOfB, &s.x_alignment, sizeof(uint32_t)) == kSuccess &&
              library.set_preference(preference, kAlignmentOfC, &s.y_alignment, sizeof(uint32_t)) == kSuccess &&
              library.set_preference(preference, kAlignmentOfD, &s.y_alignment, sizeof(uint32_t)) == kSuccess;
    if (ok && s.along_rows) ok = library.set_product(product_, kOperationOfA, &kTranspose, sizeof(int32_t)) == kSuccess;
    if (ok && s.has_bias) ok = library.set_product(product_, kEpilogue, &kAddBias, sizeof(int32_t)) == kSuccess;
    int found = 0;
    fits_ = ok && library.choose(handle, product_, w_, x_, y_, y_, preference, 1, &choice_, &found) == kSuccess &&
            found == 1 && choice_.status == kSuccess;
    if (preference) library.destroy_preference(preference);
  }
  Product(const Product&) = delete;
  ~Product() {
    for (Object layout : {w_, x_, y_}) {
      if (layout) library_.destroy_layout(layout);
    }
    if (product_) library_.destroy_product(product_);
  }

  bool fits() const { return fits_; }
  int64_t workspace() const { return static_cast<int64_t>(choice_.workspace); }
  bool launch(const Problem& p, const void* w, const float* alpha, void* workspace, cudaStream_t stream) const {
    if (p.bias && library_.set_product(product_, kBiasPointer, &p.bias, sizeof p.bias) != kSuccess) return false;
    return library_.multiply(handle_, product_, alpha, w, w_, p.x, x_, zero_, p.y, y_, p.y, y_, choice_.algorithm,
                             workspace, choice_.workspace, stream) == kSuccess;
  }

 private:
  const Library& library_;
  const Object handle_;
  void* zero_ = nullptr;
  Object product_ = nullptr, w_ = nullptr, x_ = nullptr, y_ = nullptr;
  Choice choice_{};
  bool fits_ = false;
};

// A thread's own, for it keeps a bias; forgotten where shapes never come again. Null where there is none.
const Product* product_of(const Problem& p, Sum sum) {
  constexpr size_t kMostKept = 512;
  int device = 0;
  cudaGetDevice(&device);
  const Object handle = handle_of(device);
  if (!handle) return nullptr;
  const Shape shape{device,
                    p.M,
                    p.N,
                    p.K,
                    p.x_row,
                    p.y_row,
                    sum == Sum::kAlongRowsOfW,
                    p.w_scale_step != 0,
                    p.bias != nullptr,
                    alignment_of(p.x),
                    alignment_of(p.y),
                    p.x_dtype};
  thread_local std::map<Shape, Product> products;
  if (products.size() >= kMostKept && !products.count(shape)) products.clear();
  const Product& product = products.try_emplace(shape, *Library::found(), handle, shape).first->second;
  return product.fits() ? &product : nullptr;
}

__global__ void multiply_scales(const float* w_scale, const float* x_scale, int count, float* alpha) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) alpha[i] = __fmul_rn(w_scale[i], *x_scale);
}

}  // namespace

bool fits_matmul_dense(const Problem& p, Sum sum) {
  if (p.x_dtype == Dtype::kFloat || p.y_dtype != p.x_dtype || p.experts != 1 || p.offs || p.K == 0) return false;
  if (!p.w_scale || (p.w_scale_step && !on_16_bytes(p.w_scale)) || (p.x_scale && p.x_scale_step)) return false;
  // Where rows are not aligned, cuBLASLt's kernels round before they add a bias too (17 columns on an H200).
  const bool rows_are_aligned = on_16_bytes(p.x) && p.x_row % 8 == 0 && p.N % 8 == 0 && p.y_row % 8 == 0 &&
                                p.K % 8 == 0;
  const bool is_vector = p.bias_dtype == p.y_dtype && p.bias_column == 1 && p.bias_row == 0 && on_16_bytes(p.bias);
  if (p.bias && !(is_vector && rows_are_aligned)) return false;
  return Library::found() && product_of(p, sum);
}

bool launch_matmul_dense(const Problem& p, const void* w, Sum sum, const std::function<void*(int64_t)>& scratch,
                         cudaStream_t stream) {
  const Product* product = product_of(p, sum);
  if (!product) return false;
  const int64_t workspace_bytes = (product->workspace() + 255) / 256 * 256;
  const int count = p.w_scale_step ? p.N : 1;
  const int64_t bytes = workspace_bytes + (p.x_scale ? count * static_cast<int64_t>(sizeof(float)) : 0);
  uint8_t* const at = bytes ? static_cast<uint8_t*>(scratch(bytes)) : nullptr;
  const float* alpha = p.w_scale;
  if (p.x_scale) {
    float* both = reinterpret_cast<float*>(at + workspace_bytes);
    multiply_scales<<<(count + 255) / 256, 256, 0, stream>>>(p.w_scale, p.x_scale, count, both);
    alpha = both;
  }
  return product->launch(p, w, alpha, at, stream);
}

}  // namespace nvfp4
