/* Where a block of 64 elements is not zero, as a mask. */
#include "cpu.h"

static uint64_t mask_scalar(const void *w, macko_dtype dtype, int64_t start, int count) {
    uint64_t mask = 0;
    if (dtype == MACKO_F32)
        for (int i = 0; i < count; i++) mask |= (uint64_t)((((const uint32_t *)w)[start + i] & 0x7fffffffu) != 0) << i;
    else
        for (int i = 0; i < count; i++) mask |= (uint64_t)((((const uint16_t *)w)[start + i] & 0x7fff) != 0) << i;
    return mask;
}

#if MACKO_X86
static MACKO_TARGET_AVX2 uint64_t mask_avx2(const void *w, macko_dtype dtype, int64_t start, int count) {
    if (count < MACKO_BLOCK) return mask_scalar(w, dtype, start, count);
    uint64_t zeros = 0;
    if (dtype == MACKO_F32) {
        const __m256i bits = _mm256_set1_epi32(0x7fffffff);
        for (int i = 0; i < MACKO_BLOCK; i += 8) {
            const __m256i v = _mm256_loadu_si256((const __m256i *)((const uint32_t *)w + start + i));
            const __m256i zero = _mm256_cmpeq_epi32(_mm256_and_si256(v, bits), _mm256_setzero_si256());
            zeros |= (uint64_t)(unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(zero)) << i;
        }
    } else {
        const __m256i bits = _mm256_set1_epi16(0x7fff);
        for (int i = 0; i < MACKO_BLOCK; i += 32) {
            const __m256i *v = (const __m256i *)((const uint16_t *)w + start + i);
            const __m256i low = _mm256_and_si256(_mm256_loadu_si256(v), bits);
            const __m256i high = _mm256_and_si256(_mm256_loadu_si256(v + 1), bits);
            const __m256i zero = _mm256_packs_epi16(_mm256_cmpeq_epi16(low, _mm256_setzero_si256()),
                                                    _mm256_cmpeq_epi16(high, _mm256_setzero_si256()));
            zeros |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(zero, 0xd8)) << i;
        }
    }
    return ~zeros;
}

static MACKO_TARGET_AVX512 uint64_t mask_avx512(const void *w, macko_dtype dtype, int64_t start, int count) {
    if (count < MACKO_BLOCK) return mask_scalar(w, dtype, start, count);
    uint64_t mask = 0;
    if (dtype == MACKO_F32) {
        const __m512i bits = _mm512_set1_epi32(0x7fffffff);
        for (int i = 0; i < MACKO_BLOCK; i += 16)
            mask |= (uint64_t)_mm512_test_epi32_mask(_mm512_loadu_si512((const uint32_t *)w + start + i), bits) << i;
    } else {
        const __m512i bits = _mm512_set1_epi16(0x7fff);
        for (int i = 0; i < MACKO_BLOCK; i += 32)
            mask |= (uint64_t)_mm512_test_epi16_mask(_mm512_loadu_si512((const uint16_t *)w + start + i), bits) << i;
    }
    return mask;
}

static macko_nonzeros *const paths[] = {mask_scalar, mask_avx2, mask_avx512};
#else
static macko_nonzeros *const paths[] = {mask_scalar};
#endif

macko_nonzeros *macko_nonzeros_of(macko_cpu_path path) {
    return paths[path];
}
