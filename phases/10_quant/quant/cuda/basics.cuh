// What every kernel here needs: short names, bfloat16, dependent launch.
#pragma once
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__

// Numbers: bfloat16 comes in pairs, two in a word.
INLINE float low(u32 w) { return __uint_as_float(w << 16); }
INLINE float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
INLINE float wide(u16 v) { return __uint_as_float((u32)v << 16); }
INLINE u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
INLINE float as_bf16(float a) { return low(pack(a, 0.f)); }

// Dependent launch: a kernel may start while the one before it runs, and waits until that one is complete.
INLINE void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
