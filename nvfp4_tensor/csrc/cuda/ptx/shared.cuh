// PTX of shared memory, mbarriers and asynchronous copies: one instruction per function.
#pragma once

#include <cstdint>

namespace nvfp4 {

// Copy 16 (or 8) bytes asynchronously from global to shared memory, zeros beyond the first `bytes`.
__device__ __forceinline__ void cp_async_16(uint32_t to, const uint8_t* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_8(uint32_t to, const uint8_t* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint32_t address_of(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ float4 load_shared_floats(uint32_t from) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_floats(uint32_t to, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Keep a value in a register: the compiler does not recompute it at each use.
template <typename Value>
__device__ __forceinline__ void keep(Value& value) {
  asm volatile("" : "+r"(value));
}
template <typename Value, typename... Values>
__device__ __forceinline__ void keep(Value& value, Values&... values) {
  keep(value);
  keep(values...);
}

// True in one lane. All lanes of the warp must call it.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected = threadIdx.x % 32 == 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
#endif
  return elected;
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(barrier) : "memory");
}

#if __CUDA_ARCH__ >= 900
#define NVFP4_MBARRIER_WAIT "mbarrier.try_wait"  // sleeps a while
#else
#define NVFP4_MBARRIER_WAIT "mbarrier.test_wait"
#endif
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "WAIT_%=: " NVFP4_MBARRIER_WAIT
      ".parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT_%=; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// cluster_sync in two halves; this arrive has no release semantics.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Wait for all blocks of the cluster, so that none exits while others read its shared memory.
__device__ __forceinline__ void cluster_wait_all() {
  cluster_arrive();
  cluster_wait();
}

// PDL (programmatic dependent launch): wait until the previous kernel in the stream has finished and its results are
// visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// PDL: let blocks of the next kernel start where multiprocessors have room.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The address in block `rank` of the cluster that corresponds to `shared` in this block.
__device__ __forceinline__ uint32_t mapa_shared_cluster(uint32_t shared, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(shared) : "r"(rank));
#endif
  return shared;
}

__device__ __forceinline__ float load_from_rank(const float* from, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];"
               : "=f"(v)
               : "r"(mapa_shared_cluster(address_of(from), rank))
               : "memory");
  return v;
#else
  return *from;
#endif
}

// Store to the address in block `rank` of the cluster that corresponds to `to` in this block.
__device__ __forceinline__ void store_to_rank(float* to, uint32_t rank, float v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(mapa_shared_cluster(address_of(to), rank)), "f"(v) : "memory");
#else
  *to = v;
#endif
}

}  // namespace nvfp4
