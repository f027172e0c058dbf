/* Included before all sources of a Linux wheel. zig links a mathematical library of its own, with other last bits than
   glibc's, and its own memcpy. A reference with a version can only be to glibc. These versions are in every glibc that the
   wheel allows. */
#if defined(__x86_64__)
#define DELTIC_GLIBC "GLIBC_2.2.5"
#define DELTIC_GLIBC_MEMCPY "GLIBC_2.14"
#else
#define DELTIC_GLIBC "GLIBC_2.17"
#define DELTIC_GLIBC_MEMCPY "GLIBC_2.17"
#endif
#define DELTIC_FROM_GLIBC(name, version) __asm__(".symver " #name ", " #name "@" version);
DELTIC_FROM_GLIBC(exp, DELTIC_GLIBC)
DELTIC_FROM_GLIBC(log, DELTIC_GLIBC)
DELTIC_FROM_GLIBC(sin, DELTIC_GLIBC)
DELTIC_FROM_GLIBC(cos, DELTIC_GLIBC)
DELTIC_FROM_GLIBC(sincos, DELTIC_GLIBC)
DELTIC_FROM_GLIBC(log1pf, DELTIC_GLIBC)
DELTIC_FROM_GLIBC(expf, "GLIBC_2.27")
DELTIC_FROM_GLIBC(exp2f, "GLIBC_2.27")
DELTIC_FROM_GLIBC(logf, "GLIBC_2.27")
DELTIC_FROM_GLIBC(memcpy, DELTIC_GLIBC_MEMCPY)
DELTIC_FROM_GLIBC(memmove, DELTIC_GLIBC)
DELTIC_FROM_GLIBC(memset, DELTIC_GLIBC)
