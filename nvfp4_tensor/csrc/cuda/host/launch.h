// Launches of kernels whose blocks form clusters, or which begin before the kernel before them is done (PDL,
// programmatic dependent launch).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "cuda/host/machine.h"

namespace nvfp4 {

constexpr int kMostBlocksInCluster = 8;  // on every device that has clusters

// All but the first are PDL: the kernel waits by itself (griddepcontrol_wait). The last one's previous kernel is
// launch_clear's, of one thread, which leaves room for any grid.
enum class Begins { kAfterPrevious, kBeforePreviousEnds, kBesideClear };

// blocks: of a cluster, along x.
struct Launch {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};

  Launch(dim3 grid, unsigned blocks, int threads, int shared_bytes, cudaStream_t stream, Begins begins) {
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (begins != Begins::kAfterPrevious && this_machine().capability >= 90) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (blocks > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = blocks;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
  }
  Launch(const Launch&) = delete;  // config points into it
};

// Clusters of so many blocks that run at a time: fewer than multiprocessors / blocks where they do not divide a GPC.
// The first call on a device lets the kernel have its shared memory.
template <auto kKernel>
int resident_clusters(int blocks, int threads, int shared_bytes) {
  struct Known {
    int device = -1;
    std::array<int, kMostBlocksInCluster + 1> clusters{};
  };
  thread_local Known known;
  int device = 0;
  cudaGetDevice(&device);
  if (known.device != device) {
    known = {};
    known.device = device;
    allow_shared_bytes(reinterpret_cast<const void*>(kKernel), shared_bytes);
  }
  int& count = known.clusters[blocks];
  if (count == 0) {
    count = std::max(this_machine().multiprocessors / blocks, 1);
    if (blocks > 1) {
      const Launch launch(dim3(blocks, count), blocks, threads, shared_bytes, nullptr, Begins::kAfterPrevious);
      int active = 0;
      if (cudaOccupancyMaxActiveClusters(&active, kKernel, &launch.config) == cudaSuccess && active > 0) {
        count = std::min(count, active);
      }
    }
  }
  return count;
}

}  // namespace nvfp4
