// What every kernel needs: short names, bfloat16, dependent launch, tensor cores.
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

// What another kernel has just written: one, two, or eight numbers of bfloat16, or one of float32.
INLINE u16 load_one(const u16* p) {
  u16 r;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(r) : "l"(p) : "memory");
  return r;
}
INLINE u32 load_two(const u16* p) {
  u32 r;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
}
INLINE uint4 load_eight(const u16* p) {
  uint4 r;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
  return r;
}
INLINE float load_float(const float* p) {
  float r;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory");
  return r;
}

// Tensor cores: 16 rows times eight columns. Of a lane, rows lane / 4 (a0, a2) and eight further down (a1, a3).
INLINE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
