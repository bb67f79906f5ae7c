"""Run a GPU kernel text on the CPU, strictly: the text is compiled as C++ and every thread of a threadgroup is a fiber.

Threads run in turn and stop only at barriers and simdgroup operations. Every access to an array goes through a checked pointer,
so that mistakes which a GPU hides (a missing barrier, a read past the end) are errors with the array's name. No header of the standard
library is included: a text can use the kernel dialect and nothing else.
"""
import ctypes, functools, hashlib, math, os, platform, re, shutil, subprocess, sys, tempfile
from dataclasses import dataclass
from pathlib import Path
import numpy as np

class EmulatorError(Exception): "Something is wrong with the kernel text or its launch"
class NoCompiler(EmulatorError): "No C++ compiler on this machine"
class CompileError(EmulatorError): "The text is not valid in the dialect"
class DivergentBarrier(EmulatorError): "Threads that must meet at one place did not"
class OutOfBounds(EmulatorError): "An access outside an array"
class UnwrittenOutput(EmulatorError): "Output elements that no thread wrote"
class UninitialisedRead(EmulatorError): "A read of an element that nobody wrote"
class DataRace(EmulatorError): "Two threads used one element, at least one wrote, and no barrier stands between"
class BadArgument(EmulatorError): "An unaligned vector load, or a lane or shift that does not exist"

ERRORS = None, DivergentBarrier, OutOfBounds, UninitialisedRead, DataRace, BadArgument # by `emu::Code`

PRELUDE = r'''
typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef decltype(sizeof 0) size_t;
typedef _Float16 half;
struct half2 { half x, y; }; struct float2 { float x, y; };
struct uint2 { uint x, y; }; struct uint3 { uint x, y, z; }; struct uint4 { uint x, y, z, w; };

template<class To, class From> static inline To emu_cast(From v) { static_assert(sizeof(To)==sizeof(From), ""); To r; __builtin_memcpy(&r, &v, sizeof r); return r; }

struct bf16 { // storage only: arithmetic happens in float
  ushort raw;
  bf16() = default;
  bf16(float v) { uint u = emu_cast<uint>(v); raw = v!=v ? 0x7fc0 : (u + 0x7fff + (u>>16 & 1)) >> 16; }
  operator float() const { return emu_cast<float>((uint)raw << 16); }
};

// --- fibers

extern "C" void emu_switch(void** save, void* load) asm("emu_switch"); // keep this stack pointer, go on with that one
#if defined __x86_64__
asm(".text\nemu_switch:\n push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
enum { EMU_FRAME = 8, EMU_ENTRY = 6 }; // words on a new stack, and which of them is the return address
#elif defined __aarch64__
asm(".text\n.p2align 2\nemu_switch:\n sub sp, sp, #160\n stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n"
    " stp x25, x26, [sp, #48]\n stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
    " stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n mov x9, sp\n str x9, [x0]\n mov sp, x1\n ldp x19, x20, [sp]\n"
    " ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    " ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n add sp, sp, #160\n ret\n");
enum { EMU_FRAME = 20, EMU_ENTRY = 11 };
#else
#error the emulator knows x86-64 and arm64 only
#endif

namespace emu {
enum Code { OK, DIVERGENT, OUT_OF_BOUNDS, UNINITIALISED, RACE, BAD_ARGUMENT };
enum Wait { READY, AT_SIMD, AT_BARRIER, DONE };
struct Site { const char *name, *file; int line, id; bool barrier; };
struct Fiber { void* sp; int index, wait; Site site; uint3 position; };

static Fiber fibers[1024], *me;
static void* scheduler;
static uint3 group;
static uint group_id, phase, step[32]; // for the order of accesses: a threadgroup barrier ends a phase, a simdgroup barrier a step of one simdgroup
static uint parity[32];                // which of two slots a simdgroup's operation uses: one lane may be an operation ahead of another
static bool collectives_order, knows_last;
static int arrived[4096]; // threadgroups that came to `last_one`, by the place of their marks
static Code code;
static char message[500], unwritten[500]; // unwritten: the first read of an element that nobody had written

static void report(Code c, const char* format, ...) { // an unwritten element waits for the end of its phase: it is a race if it is written till then
  bool waits = c==UNINITIALISED;
  if (!waits) code = c;
  if (unwritten[0] && c!=RACE) { if (!waits) code = UNINITIALISED; return; } // what was read may be the cause of the rest
  char* to = waits ? unwritten : message;
  __builtin_va_list args; __builtin_va_start(args, format);
  int n = __builtin_vsnprintf(to, 500, format, args);
  __builtin_va_end(args);
  if (me && n<500) __builtin_snprintf(to+n, 500-n, " (thread %u,%u,%u of threadgroup %u,%u,%u)",
    me->position.x, me->position.y, me->position.z, group.x, group.y, group.z);
}
#define EMU_FAIL(...) (emu::report(__VA_ARGS__), emu::leave()) // the fiber is left where it is

static void leave() { emu_switch(&me->sp, scheduler); __builtin_unreachable(); }
static void wait(Wait w, Site site) { me->wait = w; me->site = site; emu_switch(&me->sp, scheduler); }
static int lane() { return me->index & 31; }
static int simdgroup() { return me->index >> 5; }

// --- checked memory

struct Shadow { uint group, write_phase, write_step, read_phase, read_step, readers; int writer, reader; }; // threads count from 1; readers: simdgroups

struct Memory {
  const char* name; long n; Shadow* shadow; bool shared; // no shadow: an input
  void bounds(long i, const char* what) const { if (i<0 || i>=n) EMU_FAIL(OUT_OF_BOUNDS, "%s of %s[%ld], which has %ld elements", what, name, i, n); }
  Shadow& at(long i) const { Shadow& s = shadow[i]; if (shared && s.group!=group_id) s = Shadow{group_id}; return s; }
  static bool mine(int thread) { return thread-1==me->index; }
  static bool after_write(const Shadow& s) {
    if (s.group!=group_id) return knows_last; // `last_one` orders what the other threadgroups wrote
    return (mine(s.writer) || s.write_phase!=phase || ((s.writer-1)>>5==simdgroup() && s.write_step!=step[simdgroup()])); }
  static bool after_reads(const Shadow& s) {
    return s.group!=group_id || s.read_phase!=phase || !(s.readers & ~(1u<<simdgroup())) && (s.read_step!=step[simdgroup()] || mine(s.reader)); }
  void reading(long i) const {
    bounds(i, "read");
    if (!shadow) return;
    Shadow& s = at(i);
    if (!s.writer) report(UNINITIALISED, "read of %s[%ld], which nobody has written", name, i);
    else if (!after_write(s)) race("read", i, "wrote");
    uint now = step[simdgroup()], bit = 1u<<simdgroup();
    if (s.read_phase!=phase) s.readers = 0;
    if (!s.readers || (s.readers==bit && s.read_step!=now)) s.reader = me->index+1; // the first reader since a barrier
    else if (!mine(s.reader)) s.reader = 0;                                        // several
    s.read_phase = phase; s.read_step = now; s.readers |= bit;
  }
  void writing(long i, bool equal) const { // `equal`: the value is there already, so that the order of writes does not matter
    Shadow& s = at(i);
    bool ordered = !s.writer || after_write(s);
    if (!ordered && !equal) race("write", i, "wrote too");
    if (!after_reads(s)) EMU_FAIL(RACE, "write of %s[%ld], which another thread read, with no barrier between", name, i);
    if (ordered) { s.group = group_id; s.writer = me->index+1; s.write_phase = phase; s.write_step = step[simdgroup()]; }
  }
  void race(const char* what, long i, const char* did) const {
    EMU_FAIL(RACE, "%s of %s[%ld], which thread %d%s %s, with no barrier between", what, name, i, shadow[i].writer-1,
      shadow[i].group==group_id ? "" : " of another threadgroup", did); }
};

template<class T> struct Array : Memory {
  T* data;
  T read(long i) const { reading(i); return data[i]; }
  void write(long i, T v) const {
    bounds(i, "write");
    writing(i, at(i).writer && !__builtin_memcmp(&data[i], &v, sizeof v));
    data[i] = v;
  }
};

template<class T> struct Value { typedef T type; };
template<> struct Value<bf16> { typedef float type; };
template<class T> struct Pointer;
template<class T> struct Ref;
template<class T> static inline T&& value(T&& v) { return (T&&)v; }
template<class T> static inline typename Value<T>::type value(Ref<T>&& r) { return (Ref<T>&&)r; }
template<class T> struct Ref { // an element that can be written; a temporary only, else `auto v = m[i]` would read later than it says
  const Array<T>* array; long i;
  operator typename Value<T>::type() && { return array->read(i); }
  T operator=(T v) && { array->write(i, v); return v; }
  T operator=(Ref&& o) && { return (Ref&&)*this = o.array->read(o.i); }
  Pointer<T> operator&() && { return {array, i}; }
#define EMU_ASSIGN(op) template<class V> T operator op##=(V v) && { return (Ref&&)*this = (T)(array->read(i) op value((V&&)v)); }
  EMU_ASSIGN(+) EMU_ASSIGN(-) EMU_ASSIGN(*) EMU_ASSIGN(/) EMU_ASSIGN(%) EMU_ASSIGN(&) EMU_ASSIGN(|) EMU_ASSIGN(^) EMU_ASSIGN(<<) EMU_ASSIGN(>>)
};
template<class A, class B> struct Either {};             // has a type if one of the two is a Ref
template<class A, class B> struct Either<Ref<A>, B> { typedef int type; };
template<class A, class B> struct Either<A, Ref<B>> { typedef int type; };
template<class A, class B> struct Either<Ref<A>, Ref<B>> { typedef int type; };
#define EMU_BINARY(op) template<class A, class B, typename Either<A, B>::type = 0> static inline auto operator op(A&& a, B&& b) { return value((A&&)a) op value((B&&)b); }
EMU_BINARY(+) EMU_BINARY(-) EMU_BINARY(*) EMU_BINARY(/) EMU_BINARY(%) EMU_BINARY(&) EMU_BINARY(|) EMU_BINARY(^) EMU_BINARY(<<) EMU_BINARY(>>)
EMU_BINARY(<) EMU_BINARY(>) EMU_BINARY(<=) EMU_BINARY(>=) EMU_BINARY(==) EMU_BINARY(!=)
template<class T> static inline auto operator-(Ref<T>&& r) { return -value((Ref<T>&&)r); }
template<class T> static inline Ref<T> element(const Array<T>* a, long i) { return {a, i}; }
template<class T> static inline T element(const Array<const T>* a, long i) { return a->read(i); }

template<class T> struct Pointer {
  const Array<T>* array; long at, first = 0, size = -1; // size: of the row that this points into, if it is one of several
  auto operator[](long i) const {
    i += at;
    if (size>=0 && (i<first || i>=first+size)) EMU_FAIL(OUT_OF_BOUNDS, "index %ld into a row of %ld elements of %s", i-first, size, array->name);
    return element(array, i);
  }
  auto operator*() const { return (*this)[0]; }
  Pointer& operator+=(long i) { at += i; return *this; }
  Pointer& operator-=(long i) { return *this += -i; }
  Pointer& operator++() { return *this += 1; }
  Pointer operator+(long i) const { Pointer r = *this; return r += i; }
  Pointer operator-(long i) const { return *this + -i; }
  long operator-(Pointer o) const { return at-o.at; }
  bool operator==(Pointer o) const { return at==o.at; }
  bool operator!=(Pointer o) const { return at!=o.at; }
  bool operator<(Pointer o) const { return at<o.at; }
};

template<class T, int... N> struct Rows; // an array of several dimensions
template<class T, int N> static inline Pointer<T> part(const Array<T>* a, long at) { return {a, at, at, N==a->n ? -1 : N}; }
template<class T, int N, int M, int... Rest> static inline Rows<T, N, M, Rest...> part(const Array<T>* a, long at) { return {a, at}; }
template<class T, int N, int... Rest> struct Rows<T, N, Rest...> {
  const Array<T>* array; long at;
  auto operator[](long i) const {
    if (i<0 || i>=N) EMU_FAIL(OUT_OF_BOUNDS, "index %ld into a dimension of %d of %s", i, N, array->name);
    return part<T, Rest...>(array, at + i*(Rest * ...));
  }
};
template<class T, int... N> struct Shared {
  Array<T> array; T data[(N * ...)]; Shadow shadow[(N * ...)];
  auto open(const char* name) { (Memory&)array = {name, (N * ...), shadow, true}; array.data = data; return part<T, N...>(&array, 0); }
};

// --- threads of one launch

static bool meet(int first, int last, Wait w) { // true: all threads wait at one place; false, with the error reported: they do not
  for (int i=first; i<last; ++i) {
    const Fiber &a = fibers[first], &b = fibers[i];
    if (a.wait==b.wait && (w==DONE || a.site.id==b.site.id)) continue;
    char where[2][200];
    for (int k=0; k<2; ++k) { const Fiber& f = k ? b : a;
      if (f.wait==DONE) __builtin_snprintf(where[k], 200, "thread %d has finished", f.index);
      else __builtin_snprintf(where[k], 200, "thread %d waits at %s (%s, line %d)", f.index, f.site.name, f.site.file, f.site.line); }
    me = nullptr;
    report(DIVERGENT, "%s, but %s, in threadgroup %u,%u,%u", where[0], where[1], group.x, group.y, group.z);
    return false;
  }
  return true;
}

static void run_group(int n, const int* order, char* stacks, long stack_size, void (*entry)()) {
  for (int i=0; i<n; ++i) {
    void** sp = (void**)(stacks + (i+1)*stack_size) - EMU_FRAME;
    for (int k=0; k<EMU_FRAME; ++k) sp[k] = nullptr;
    sp[EMU_ENTRY] = (void*)entry;
    fibers[i].sp = sp; fibers[i].wait = READY;
  }
  ++group_id; knows_last = false;
  for (;;) {
    ++phase;
    for (int o=0; o<n;) { // each simdgroup as far as it comes alone
      int first = order[o] & ~31, last = first+32<n ? first+32 : n;
      for (;;) {
        for (int k=0; k<last-first; ++k) {
          me = &fibers[order[o+k]];
          if (me->wait==DONE) continue;
          me->wait = READY;
          emu_switch(&scheduler, me->sp);
          if (code) return;
        }
        bool simd = false;
        for (int i=first; i<last; ++i) simd |= fibers[i].wait==AT_SIMD;
        if (!simd) break;
        if (!meet(first, last, AT_SIMD)) return;
        if (last-first<32) { report(DIVERGENT, "%s (%s, line %d) in a simdgroup of %d threads", me->site.name, me->site.file, me->site.line, last-first); return; }
        parity[first>>5] ^= 1;
        if (collectives_order || me->site.barrier) ++step[first>>5];
      }
      o += last-first;
    }
    if (unwritten[0]) { code = UNINITIALISED; return; }
    bool barrier = false;
    for (int i=0; i<n; ++i) barrier |= fibers[i].wait!=DONE;
    if (!meet(0, n, barrier ? AT_BARRIER : DONE) || !barrier) return;
  }
}

static int launch(const uint* grid, const uint* tg, const int* order, char* stacks, long stack_size, bool collectives, void (*entry)()) {
  code = OK; unwritten[0] = 0; collectives_order = collectives;
  for (int& i : arrived) i = 0;
  uint n = tg[0]*tg[1]*tg[2];
  for (uint i=0; i<n; ++i) { fibers[i].index = i; fibers[i].position = {i%tg[0], i/tg[0]%tg[1], i/tg[0]/tg[1]}; }
  for (uint z=0; z<grid[2]/tg[2] && !code; ++z) for (uint y=0; y<grid[1]/tg[1] && !code; ++y) for (uint x=0; x<grid[0]/tg[0] && !code; ++x) {
    group = {x, y, z};
    run_group(n, order, stacks, stack_size, entry);
  }
  return code;
}

// --- simdgroup operations

template<class T> static const T* gather(Site site, T v) { // every lane's value
  static T slots[32][2][32];
  T* slot = slots[simdgroup()][parity[simdgroup()]];
  slot[lane()] = v;
  wait(AT_SIMD, site);
  return slot;
}
static int checked_lane(Site site, long i) { if (i<0 || i>31) EMU_FAIL(BAD_ARGUMENT, "%s (%s, line %d): lane or mask %ld", site.name, site.file, site.line, i); return i; }
template<class T> static T shuffle(Site site, T v, long source) { checked_lane(site, source); return gather(site, v)[source]; }
template<class T, class F> static T reduce(Site site, T v, F f) { // a butterfly: the same bits in all lanes
  T x[32]; __builtin_memcpy(x, gather(site, v), sizeof x);
  for (int m=16; m; m>>=1) for (int i=0; i<m; ++i) x[i] = f(x[i], x[i+m]);
  return x[0];
}
} // namespace emu

// --- the dialect

#define thread
#define FN inline
#define UNROLL
namespace mem_flags { enum { mem_threadgroup }; }
#define EMU_SITE(...) emu::Site{EMU_SITE_NAME(__VA_ARGS__, false)}
#define EMU_SITE_NAME(name, barrier, ...) name, __FILE__, __LINE__, __COUNTER__, barrier
#define threadgroup_barrier(flags) ((void)(flags), emu::wait(emu::AT_BARRIER, EMU_SITE("threadgroup_barrier", true)))
#define simdgroup_barrier(flags) ((void)(flags), emu::wait(emu::AT_SIMD, EMU_SITE("simdgroup_barrier", true)))

#define EMU_MATH(f, g) static inline float f(float x) { return __builtin_##g(x); }
EMU_MATH(fabs, fabsf) EMU_MATH(exp2, exp2f) EMU_MATH(log2, log2f) EMU_MATH(rint, rintf) EMU_MATH(floor, floorf) EMU_MATH(ceil, ceilf) EMU_MATH(sqrt, sqrtf)
static inline float fast_exp2(float x) { return exp2(x); }
static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
#define EMU_MIN_MAX(T) static inline T min(T a, T b) { return b<a ? b : a; } static inline T max(T a, T b) { return a<b ? b : a; }
EMU_MIN_MAX(int) EMU_MIN_MAX(uint)

#define EMU_SHUFFLE(T) \
  static T emu_shuffle(emu::Site s, T v, long i) { return emu::shuffle(s, v, i); } \
  static T emu_shuffle_xor(emu::Site s, T v, long m) { return emu::shuffle(s, v, emu::checked_lane(s, m)^emu::lane()); }
#define EMU_REDUCE(f, expression) \
  static float f(emu::Site s, float v) { return emu::reduce(s, v, [](float a, float b) { return expression; }); } \
  static int f(emu::Site, int) = delete; static uint f(emu::Site, uint) = delete; // CUDA would convert them, Metal would not
EMU_SHUFFLE(float) EMU_SHUFFLE(int) EMU_SHUFFLE(uint) EMU_SHUFFLE(half)
EMU_REDUCE(emu_sum, a+b) EMU_REDUCE(emu_max, max(a, b)) EMU_REDUCE(emu_min, min(a, b))
static bool emu_any(emu::Site s, bool v) { return emu::reduce(s, (int)v, [](int a, int b) { return a|b; }); }
#define simd_shuffle(...) emu_shuffle(EMU_SITE("simd_shuffle"), __VA_ARGS__)
#define simd_shuffle_xor(...) emu_shuffle_xor(EMU_SITE("simd_shuffle_xor"), __VA_ARGS__)
#define simd_sum(...) emu_sum(EMU_SITE("simd_sum"), __VA_ARGS__)
#define simd_max(...) emu_max(EMU_SITE("simd_max"), __VA_ARGS__)
#define simd_min(...) emu_min(EMU_SITE("simd_min"), __VA_ARGS__)
#define simd_any(...) emu_any(EMU_SITE("simd_any"), __VA_ARGS__)

static inline uint bits(half h) { return emu_cast<ushort>(h); }
static inline uint bits(ushort h) { return h; }
static inline half as_half(uint x) { return emu_cast<half>((ushort)x); }
static inline float emu_float(uint h) { // of the bits of a half
  uint sign = h>>15<<31, a = h & 0x7fff;
  if (a < 0x400) return emu_cast<float>(emu_cast<uint>(a*0x1p-24f) | sign);
  return emu_cast<float>((a<0x7c00 ? (a<<13) + (112u<<23) : a<<13 | 255u<<23) | sign);
}
static inline float low2(uint x) { return emu_float(x & 0xffff); }
static inline float high2(uint x) { return emu_float(x >> 16); }
static uint emu_round(double v) { // bits of the nearest half, rounded once
  double a = __builtin_fabs(v);
  uint sign = emu_cast<unsigned long>(v) >> 63 << 15;
  if (a!=a) return 0x7e00;
  if (a>=65520) return sign | 0x7c00;
  unsigned long e = emu_cast<unsigned long>(a) >> 52;
  if (e < 1009) e = 1009;                                   // the least exponent of a half
  double steps = emu_cast<double>((e+42) << 52);            // its last bit has the weight of the half's last bit
  return sign | ((e-1009) << 10) + (uint)(emu_cast<unsigned long>(a+steps) - emu_cast<unsigned long>(steps));
}
static inline uint pack2(float lo, float hi) { return emu_round(lo) | emu_round(hi) << 16; }
// in double a product of halves is exact, and a sum is either exact or too far from a tie to matter
static inline uint fma2(uint a, uint b, uint c) {
  return emu_round((double)low2(a)*low2(b) + low2(c)) | emu_round((double)high2(a)*high2(b) + high2(c)) << 16; }
static inline uint add2(uint a, uint b) { return emu_round((double)low2(a)+low2(b)) | emu_round((double)high2(a)+high2(b)) << 16; }
static inline uint mul2(uint a, uint b) { return emu_round((double)low2(a)*low2(b)) | emu_round((double)high2(a)*high2(b)) << 16; }

static inline uint low_halves(uint a, uint b) { return (a & 0xffff) | b << 16; }
static inline uint high_halves(uint a, uint b) { return a >> 16 | (b & 0xffff0000); }
static inline uint neg2(uint x) { return x ^ 0x80008000u; }
static inline uint and_or(uint x, uint mask, uint y) { return (x & mask) | y; }
static inline uint funnel(uint lo, uint hi, uint s) {
  if (s>31) EMU_FAIL(emu::BAD_ARGUMENT, "funnel: shift %u", s);
  return ((unsigned long)hi << 32 | lo) >> s;
}
template<class P> static auto emu_aligned(const char* f, P p, long i, int n) {
  auto q = p + i;
  if (q.at%n) EMU_FAIL(emu::BAD_ARGUMENT, "%s at %s[%ld]: not a multiple of %d", f, q.array->name, q.at, n);
  return q;
}
template<class P> static inline uint2 load2(P p, long i) { auto q = emu_aligned("load2", p, i, 2); return {q[0], q[1]}; }
template<class P> static inline uint4 load4(P p, long i) { auto q = emu_aligned("load4", p, i, 4); return {q[0], q[1], q[2], q[3]}; }
template<class P> static inline uint load_half2(P p, long i) { auto q = emu_aligned("load_half2", p, i, 2); return bits(q[0]) | bits(q[1]) << 16; }
template<class P> static inline uint4 load_half8(P p, long i) {
  auto q = emu_aligned("load_half8", p, i, 8);
  return {load_half2(q, 0), load_half2(q, 2), load_half2(q, 4), load_half2(q, 6)};
}
template<class P> static inline void clear_half8(P p, long i) { auto q = emu_aligned("clear_half8", p, i, 8); for (int e=0; e<8; ++e) q[e] = half(0); }
template<class P> static inline uint peek_base(P table, uint i) { return 4*i; }
template<class P> static inline uint peek(P table, uint at) { return table[at >> 2]; }
template<class P> static inline uint poke_base(P p, uint i) { return 2*i; }
template<class P> static inline void poke(P p, uint at, uint x) { p[at >> 1] = as_half(x); }
#define hold(p)

template<class P> static bool emu_last_one(emu::Site before, emu::Site after, P marks, int i, int n, int, int) { // threadgroups run one after the other
  emu::wait(emu::AT_BARRIER, before);
  if (i<0 || i>=n) EMU_FAIL(emu::BAD_ARGUMENT, "last_one: %d of %d", i, n);
  if (marks.at%2) EMU_FAIL(emu::BAD_ARGUMENT, "last_one: marks at %ld, not a multiple of 2", marks.at);
  if (!emu::me->index) emu::knows_last = ++emu::arrived[marks.at/2%4096]==n;
  emu::wait(emu::AT_BARRIER, after);
  return emu::knows_last;
}
#define last_one(...) emu_last_one(EMU_SITE("last_one", true), EMU_SITE("last_one", true), __VA_ARGS__)

#if EMU_METAL
static inline int frag_row(int lane) { return (lane>>2 & 4) + (lane>>1 & 3); }
static inline int frag_col(int lane) { return (lane>>2 & 2) + (lane & 1); }
static inline int b_k(int lane, int e) { return frag_row(lane); }
static inline int b_n(int lane, int e) { return 2*frag_col(lane)+e; }
enum { ROW_XOR_0 = 2, ROW_XOR_1 = 4, ROW_XOR_2 = 16, COL_XOR_0 = 1, COL_XOR_1 = 8, B_PAIRED = 0 };
#define HAS_PREFETCH 0
#define HAS_LAST 0
#define TABLE_COPIES 1
#else
static inline int frag_row(int lane) { return lane>>2; }
static inline int frag_col(int lane) { return lane&3; }
static inline int b_k(int lane, int e) { return 2*frag_col(lane)+e; }
static inline int b_n(int lane, int e) { return frag_row(lane); }
enum { ROW_XOR_0 = 4, ROW_XOR_1 = 8, ROW_XOR_2 = 16, COL_XOR_0 = 1, COL_XOR_1 = 2, B_PAIRED = 1 };
#define HAS_PREFETCH 0
#define HAS_LAST 1
#define TABLE_COPIES 32
#endif
static void emu_mma(emu::Site site, float (&c)[4], uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  static struct Tile { float a[16][16], b[8][16]; } tiles[32][2]; // b transposed
  Tile& tile = tiles[emu::simdgroup()][emu::parity[emu::simdgroup()]];
  int lane = emu::lane(), g = frag_row(lane), t = 2*frag_col(lane);
  const uint a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  for (int i=0; i<4; ++i) { float* to = &tile.a[g+8*(i&1)][t+8*(i>>1)]; to[0] = low2(a[i]); to[1] = high2(a[i]); }
  for (int i=0; i<2; ++i) { tile.b[b_n(lane,0)][b_k(lane,0)+8*i] = low2(b[i]); tile.b[b_n(lane,1)][b_k(lane,1)+8*i] = high2(b[i]); }
  emu::wait(emu::AT_SIMD, site);
  for (int k=0; k<16; ++k) for (int i=0; i<4; ++i) c[i] += tile.a[g+8*(i>>1)][k]*tile.b[t+(i&1)][k];
}
static uint emu_b_from_c(emu::Site site, uint x) {
  const uint* lanes = emu::gather(site, x);
  ushort c[8][8];
  for (int l=0; l<32; ++l) { ushort* to = &c[frag_row(l)][2*frag_col(l)]; to[0] = lanes[l]; to[1] = lanes[l] >> 16; }
  int l = emu::lane();
  return c[b_k(l,0)][b_n(l,0)] | (uint)c[b_k(l,1)][b_n(l,1)] << 16;
}
#define mma(...) emu_mma(EMU_SITE("mma"), __VA_ARGS__)
#define b_from_c(...) emu_b_from_c(EMU_SITE("b_from_c"), __VA_ARGS__)
'''

LAUNCH = r'''
#define EMU_PUBLIC __attribute__((visibility("default")))
static void emu_entry() {{
  emu_kernel({args}emu::group, emu::me->position, emu::lane(), emu::simdgroup());
  emu::me->wait = emu::DONE;
  emu::leave();
}}
extern "C" EMU_PUBLIC const char* emu_message() {{ return emu::code==emu::UNINITIALISED ? emu::unwritten : emu::message; }}
extern "C" EMU_PUBLIC int emu_launch(void** data, const long* n, void** shadow, const uint* grid, const uint* threadgroup, const int* order,
    char* stacks, long stack_size, int collectives_order) {{
  {bind}
  return emu::launch(grid, threadgroup, order, stacks, stack_size, collectives_order, emu_entry);
}}
'''

C_TYPES = dict(float32='float', float16='half', int32='int', uint32='uint', uint16='ushort', uint8='uchar')
SHADOW = np.dtype([(o,'u4') for o in ('group','write_phase','write_step','read_phase','read_step','readers','writer','reader')])
STACK = 256*1024 + 5*64 # bytes; an odd number of cache lines, so that stacks do not compete for the same ones
DIMS = r'\w+\s*(?:\[[^\]]*\]\s*)+'
SHARED = re.compile(rf'\bthreadgroup\s+(\w+)\s+({DIMS}(?:,\s*{DIMS})*);')

@dataclass
class BFloat:
    "bfloat16 numbers as their bits"
    bits: np.ndarray # uint16
    @classmethod
    def rounded(cls, x): # nearest, ties to even
        u = np.asarray(x, np.float32).view(np.uint32)
        return cls(((u + 0x7fff + (u>>16 & 1)) >> 16).astype(np.uint16))
    def floats(self): return (self.bits.astype(np.uint32) << 16).view(np.float32)

def c_type(name, array):
    if array.dtype.name not in C_TYPES: raise ValueError(f'{name}: kernels have no type for {array.dtype}')
    return C_TYPES[array.dtype.name]

def shared_declaration(m):
    "C++ for a declaration of threadgroup memory"
    kind,out = m[1],''
    for o in re.findall(DIMS, m[2]):
        name,dims = re.match(r'\w+', o)[0],re.findall(r'\[([^\]]*)\]', o)
        args = ''.join(f', ({d})' for d in dims)
        out += f'static emu::Shared<{kind}{args}> emu_{name}; const auto {name} = emu_{name}.open("{name}"); '
    return out + '\n'*m[0].count('\n')

def source(header, body, inputs, outputs, layout):
    "The whole C++ text; `inputs`, `outputs`: name → C type"
    arrays = {**{k: f'const {v}' for k,v in inputs.items()}, **outputs}
    params = ''.join(f'emu::Pointer<{v}> {k}, ' for k,v in arrays.items())
    return '\n'.join([f'#define EMU_METAL {int(layout=="metal")}', PRELUDE, '#line 1 "header"', header,
        *[f'static emu::Array<{v}> emu_{k};' for k,v in arrays.items()],
        f'static void emu_kernel({params}const uint3 threadgroup_position_in_grid, const uint3 thread_position_in_threadgroup,'
        ' const uint thread_index_in_simdgroup, const uint simdgroup_index_in_threadgroup) {',
        '#line 1 "body"', SHARED.sub(shared_declaration, body), '}',
        LAUNCH.format(args=''.join(f'{{&emu_{k}, 0}}, ' for k in arrays),
            bind=' '.join(f'emu_{k}.name = "{k}"; emu_{k}.data = ({v}*)data[{i}]; emu_{k}.n = n[{i}]; emu_{k}.shadow = (emu::Shadow*)shadow[{i}];'
                for i,(k,v) in enumerate(arrays.items())))])

@functools.cache
def compiler():
    for o in (os.environ.get('CXX'), 'clang++' if sys.platform=='darwin' else 'g++', 'c++', 'clang++', 'g++'):
        if o and (path := shutil.which(o)):
            version = subprocess.run([path, '--version'], capture_output=True, text=True).stdout
            native = 'clang' in version and platform.machine()!='x86_64' # else halves need to be told to round after every operation
            return path, version, [] if native else ['-fexcess-precision=16']
    raise NoCompiler('The kernel emulator needs a C++ compiler: install g++ or clang++, or set CXX')

@functools.cache
def library(text):
    "The compiled text, from a folder of earlier results if it is there"
    path,version,flags = compiler()
    command = [path, '-std=gnu++17', '-O1', '-w', '-shared', '-fPIC', '-fvisibility=hidden', '-ffp-contract=off', '-fno-exceptions',
        '-fno-strict-aliasing', *flags]
    folder = Path(tempfile.gettempdir())/f'kernel_emulator_{os.getuid()}'
    folder.mkdir(exist_ok=True)
    so = folder/f'{hashlib.sha256(repr((command, version, text)).encode()).hexdigest()[:24]}.so'
    if not so.exists():
        with tempfile.TemporaryDirectory(dir=folder) as d: # other processes may compile the same text
            (Path(d)/'kernel.cpp').write_text(text)
            r = subprocess.run([*command, 'kernel.cpp', '-o', 'kernel.so'], cwd=d, capture_output=True, text=True)
            if r.returncode: raise CompileError(r.stderr)
            os.replace(Path(d)/'kernel.so', so)
    lib = ctypes.CDLL(str(so))
    lib.emu_message.restype = ctypes.c_char_p
    return lib

@functools.cache
def stacks(n): return np.empty(n*STACK, np.uint8)

def thread_order(n, order):
    "The order in which threads run: 'forward', 'reverse', or a seed that shuffles simdgroups and the lanes of each"
    groups = [np.arange(i, min(i+32, n)) for i in range(0, n, 32)]
    if order=='reverse': groups = [o[::-1] for o in groups[::-1]]
    elif order!='forward':
        rng = np.random.default_rng(order)
        groups = [rng.permutation(groups[i]) for i in rng.permutation(len(groups))]
    return np.concatenate(groups).astype(np.int32)

def run(header, body, inputs, outputs, grid, threadgroup, layout='cuda', # or 'metal': which lane holds what of a matrix
    order='forward', # see `thread_order`
    shuffles_order_memory=True # does a simdgroup operation that is no barrier order the accesses of its lanes to threadgroup memory?
):
    "Outputs (name → array, bfloat16 as float32) of a kernel; `inputs`: name → array or `BFloat`, `outputs`: name → (shape, dtype), `grid` in threads"
    if layout not in ('cuda', 'metal'): raise ValueError(f"layout must be 'cuda' or 'metal' (got {layout!r})")
    grid,threadgroup = (tuple(int(i) for i in o) + (1,)*(3-len(o)) for o in (grid, threadgroup))
    n = math.prod(threadgroup)
    if not 1<=n<=1024: raise ValueError(f'a threadgroup has 1 to 1024 threads (got {threadgroup})')
    if any(g<1 or g%t for g,t in zip(grid, threadgroup)): raise ValueError(f'grid {grid} is not a positive multiple of threadgroup {threadgroup}')
    given = {k: np.ascontiguousarray(v.bits if isinstance(v, BFloat) else v) for k,v in inputs.items()}
    bfloats = {k for k,v in inputs.items() if isinstance(v, BFloat)} | {k for k,(_,dtype) in outputs.items() if str(dtype)=='bfloat16'}
    made = {k: np.empty(shape, np.uint16 if k in bfloats else dtype) for k,(shape,dtype) in outputs.items()}
    shadows = {k: np.zeros(v.size, SHADOW) for k,v in made.items()}
    text = source(header, body, *({k: 'bf16' if k in bfloats else c_type(k, v) for k,v in o.items()} for o in (given, made)), layout)
    arrays = [*given.values(), *made.values()]
    pointers = lambda xs: (ctypes.c_void_p*len(arrays))(*xs)
    lib,uints = library(text),ctypes.c_uint*3
    code = lib.emu_launch(pointers(a.ctypes.data for a in arrays), (ctypes.c_long*len(arrays))(*[a.size for a in arrays]),
        pointers([None]*len(given) + [s.ctypes.data for s in shadows.values()]), uints(*grid), uints(*threadgroup),
        thread_order(n, order).ctypes.data_as(ctypes.c_void_p), ctypes.c_void_p(stacks(n).ctypes.data), ctypes.c_long(STACK), int(shuffles_order_memory))
    if code: raise ERRORS[code](lib.emu_message().decode())
    for k,s in shadows.items():
        if len(missing := np.flatnonzero(s['writer']==0)):
            first = ', '.join(map(str, np.unravel_index(missing[0], made[k].shape)))
            raise UnwrittenOutput(f'{len(missing)} of {s.size} elements of {k} were never written, the first is {k}[{first}]')
    return {k: BFloat(v).floats() if k in bfloats else v for k,v in made.items()}
