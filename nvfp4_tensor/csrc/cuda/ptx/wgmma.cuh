// wgmma with A, 64 rows, in registers and B, K-major, in shared memory, 16 of K at a time, float32 sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace nvfp4 {

// Wgmma<columns, T>::run<kAdds>(d, a, b): d (64, columns) = a (64, 16) b (16, columns), or += where kAdds.
template <int kColumns, typename T>
struct Wgmma;

// "%p0, %p1, ...": names of the first few of ten operands, and of all ten
#define NVFP4_NAMES_TO_1(p) "%" p "0, %" p "1"
#define NVFP4_NAMES_TO_3(p) NVFP4_NAMES_TO_1(p) ", %" p "2, %" p "3"
#define NVFP4_NAMES_TO_5(p) NVFP4_NAMES_TO_3(p) ", %" p "4, %" p "5"
#define NVFP4_NAMES_TO_7(p) NVFP4_NAMES_TO_5(p) ", %" p "6, %" p "7"
#define NVFP4_NAMES_TO_9(p) NVFP4_NAMES_TO_7(p) ", %" p "8, %" p "9"
#define NVFP4_NAMES_TEN(p) NVFP4_NAMES_TO_9(p) ", "
#define NVFP4_NAMES_0_TO_29 NVFP4_NAMES_TEN("") NVFP4_NAMES_TEN("1") NVFP4_NAMES_TEN("2")
#define NVFP4_NAMES_30_TO_59 NVFP4_NAMES_TEN("3") NVFP4_NAMES_TEN("4") NVFP4_NAMES_TEN("5")
#define NVFP4_NAMES_60_TO_89 NVFP4_NAMES_TEN("6") NVFP4_NAMES_TEN("7") NVFP4_NAMES_TEN("8")
#define NVFP4_NAMES_90_TO_119 NVFP4_NAMES_TEN("9") NVFP4_NAMES_TEN("10") NVFP4_NAMES_TEN("11")

#define NVFP4_NAMES_8 NVFP4_NAMES_TO_7("")
#define NVFP4_NAMES_16 NVFP4_NAMES_TEN("") NVFP4_NAMES_TO_5("1")
#define NVFP4_NAMES_32 NVFP4_NAMES_0_TO_29 NVFP4_NAMES_TO_1("3")
#define NVFP4_NAMES_48 NVFP4_NAMES_0_TO_29 NVFP4_NAMES_TEN("3") NVFP4_NAMES_TO_7("4")
#define NVFP4_NAMES_64 NVFP4_NAMES_0_TO_29 NVFP4_NAMES_30_TO_59 NVFP4_NAMES_TO_3("6")
#define NVFP4_NAMES_80 NVFP4_NAMES_0_TO_29 NVFP4_NAMES_30_TO_59 NVFP4_NAMES_TEN("6") NVFP4_NAMES_TO_9("7")
#define NVFP4_NAMES_96 NVFP4_NAMES_0_TO_29 NVFP4_NAMES_30_TO_59 NVFP4_NAMES_60_TO_89 NVFP4_NAMES_TO_5("9")
#define NVFP4_NAMES_128 \
  NVFP4_NAMES_0_TO_29 NVFP4_NAMES_30_TO_59 NVFP4_NAMES_60_TO_89 NVFP4_NAMES_90_TO_119 NVFP4_NAMES_TO_7("12")

#define NVFP4_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NVFP4_SUMS_16_FROM(i) NVFP4_SUMS_4(i), NVFP4_SUMS_4(i + 4), NVFP4_SUMS_4(i + 8), NVFP4_SUMS_4(i + 12)
#define NVFP4_SUMS_32_FROM(i) NVFP4_SUMS_16_FROM(i), NVFP4_SUMS_16_FROM(i + 16)
#define NVFP4_SUMS_8 NVFP4_SUMS_4(0), NVFP4_SUMS_4(4)
#define NVFP4_SUMS_16 NVFP4_SUMS_16_FROM(0)
#define NVFP4_SUMS_32 NVFP4_SUMS_32_FROM(0)
#define NVFP4_SUMS_48 NVFP4_SUMS_32, NVFP4_SUMS_16_FROM(32)
#define NVFP4_SUMS_64 NVFP4_SUMS_32, NVFP4_SUMS_32_FROM(32)
#define NVFP4_SUMS_80 NVFP4_SUMS_64, NVFP4_SUMS_16_FROM(64)
#define NVFP4_SUMS_96 NVFP4_SUMS_64, NVFP4_SUMS_32_FROM(64)
#define NVFP4_SUMS_128 NVFP4_SUMS_96, NVFP4_SUMS_32_FROM(96)

// `sums` is columns / 2; the four registers of a, the descriptor b and kAdds come next in the numbering of operands.
#define NVFP4_WGMMA_OF(T, type, columns, sums, a0, a1, a2, a3, b0, p0)                                           \
  template <>                                                                                                    \
  struct Wgmma<columns, T> {                                                                                     \
    template <bool kAdds>                                                                                        \
    static __device__ __forceinline__ void run(float (&d)[sums], const uint32_t* a, uint64_t b) {                \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #p0                                                        \
                   ", 0;\n"                                                                                      \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" NVFP4_NAMES_##sums \
                   "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b0 ", p, 1, 1, 0; }"                        \
                   : NVFP4_SUMS_##sums                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds));                            \
    }                                                                                                            \
  };
#define NVFP4_WGMMA(...) NVFP4_WGMMA_OF(__nv_bfloat16, "bf16", __VA_ARGS__) NVFP4_WGMMA_OF(__half, "f16", __VA_ARGS__)

NVFP4_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
NVFP4_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
NVFP4_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
NVFP4_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
NVFP4_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
NVFP4_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
NVFP4_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
NVFP4_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace nvfp4
