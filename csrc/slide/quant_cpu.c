/* slide_quant_fused on the CPU. */
#include "codes_cpu.h"

int macko_slide_quant_cpu(const void *x, macko_dtype dtype, int64_t cols, int n, macko_slide_type type, int64_t begin,
                          int64_t end, void *lifted, float *scale) {
    const int64_t depth = macko_slide_depth(cols, n), width = cols + 2 * MACKO_SLIDE_MAX_N;
    const int bytes = macko_slide_element_bytes(type);
    const int64_t windows = n ? macko_slide_groups(cols, n) * (n - 1) : 0;
    float *values = calloc((size_t)width, sizeof *values + sizeof(uint16_t));
    if (!values) return -1;
    uint16_t *codes = (uint16_t *)(values + width); /* zero after the last column, where the last group may reach */
    for (int64_t token = begin; token < end; token++) {
        if (bytes == 2) {
            memcpy(codes, (const uint16_t *)x + token * cols, (size_t)cols * 2);
            scale[token] = 1.0f;
        } else {
            for (int64_t col = 0; col < cols; col++)
                values[col] = macko_slide_load(x, (macko_slide_source)dtype, token * cols + col);
            const macko_slide_quantiser by = macko_slide_quantiser_of(macko_slide_absmax(values, cols), type);
            scale[token] = by.scale;
            for (int64_t col = 0; col < cols; col++) codes[col] = macko_slide_quantise(values[col], by, type);
        }
        for (int64_t k = 0; k < depth; k++) {
            uint16_t code = 0;
            if (!n && k < cols) code = codes[k];
            if (k / 4 < windows) code = codes[macko_slide_column(k / 4, n) + k % 4];
            if (bytes == 2)
                ((uint16_t *)lifted)[token * depth + k] = code;
            else
                ((uint8_t *)lifted)[token * depth + k] = (uint8_t)code;
        }
    }
    free(values);
    return 0;
}
