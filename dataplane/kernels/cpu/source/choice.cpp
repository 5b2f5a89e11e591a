#include "choice.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tidegate {

#if defined(__x86_64__)
namespace avx512 {
extern const Tier tier;
}
namespace avx2 {
extern const Tier tier;
}
#elif defined(__aarch64__)
namespace neon {
extern const Tier tier;
}
#endif
namespace scalar {
extern const Tier tier;
}

namespace {

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return false;
#endif
}
#endif

}  // namespace

Choice choose(const char* wanted) {
    const auto right = [wanted](const char* name) { return !*wanted || std::strcmp(wanted, name) == 0; };
#if defined(__x86_64__)
    if (right("avx512") && has_avx512()) return {"avx512", &avx512::tier};
    if (right("avx2") && has_avx2()) return {"avx2", &avx2::tier};
#elif defined(__aarch64__)
    if (right("neon") && has_dot_product()) return {"neon", &neon::tier};
#endif
    if (right("scalar")) return {"scalar", &scalar::tier};
    return {"", nullptr};
}

}  // namespace tidegate
