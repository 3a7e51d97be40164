/* The knobs' text, parsed. */
#include "knobs.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NUMBERS = 4 };
typedef struct knob {
    bool is_set;
    int numbers[MOST_NUMBERS];
} knob;

static const struct {
    const char *key;
    int numbers;
    const char *value;
} KNOBS[MACKO_NUM_KNOBS] = {
#define ROW(id, key, numbers, value) {key, numbers, value},
    MACKO_KNOBS(ROW)
#undef ROW
};

static knob knobs[MACKO_NUM_KNOBS];

const int *macko_knob(macko_knob_id id) {
    return knobs[id].is_set ? knobs[id].numbers : NULL;
}

/* Which of some words [text, end) is, -1 for none. */
static int word_of(const char *words, const char *text, const char *end) {
    for (int index = 0;; index++) {
        const size_t length = strcspn(words, "|");
        if (length == (size_t)(end - text) && !strncmp(words, text, length)) return index;
        if (!words[length]) return -1;
        words += length + 1;
    }
}

/* So many numbers that are [text, end); false where they are not. */
static bool read_numbers(const char *text, const char *end, int count, int *numbers) {
    for (int i = 0; i < count; i++, text++) {
        char *stop;
        if (*text < '0' || *text > '9') return false;
        const long number = strtol(text, &stop, 10);
        if (number > MACKO_KNOB_MOST || (i + 1 < count ? *stop != 'x' : stop != end)) return false;
        numbers[i] = (int)number;
        text = stop;
    }
    return true;
}

const char *macko_knobs_set(const char *text) {
    static char error[512];
    knob read[MACKO_NUM_KNOBS] = {0};
    for (const char *end; *text; text = *end ? end + 1 : end) {
        end = text + strcspn(text, ",");
        if (end == text) continue;
        const char *equals = memchr(text, '=', (size_t)(end - text)), *value = equals ? equals + 1 : end;
        const size_t key_length = (size_t)((equals ? equals : end) - text);
        int id = 0;
        while (id < MACKO_NUM_KNOBS && (strncmp(KNOBS[id].key, text, key_length) || KNOBS[id].key[key_length])) id++;
        if (id == MACKO_NUM_KNOBS) {
            int at = snprintf(error, sizeof error, "expected a key of");
            for (id = 0; id < MACKO_NUM_KNOBS; id++)
                at += snprintf(error + at, sizeof error - (size_t)at, "%s %s", id ? "," : "", KNOBS[id].key);
            snprintf(error + at, sizeof error - (size_t)at, "; got '%.*s'", (int)(end - text), text);
            return error;
        }
        read[id].is_set = true;
        const bool has_words = strchr(KNOBS[id].value, '|') != NULL;
        const int word = has_words ? word_of(KNOBS[id].value, value, end) : 0, count = KNOBS[id].numbers;
        if (!count) read[id].numbers[0] = word;
        if (word < 0 || (count && !read_numbers(value, end, count, read[id].numbers))) {
            snprintf(error, sizeof error, "%s is '%.*s', expected %s", KNOBS[id].key, (int)(end - value), value,
                     KNOBS[id].value);
            return error;
        }
    }
    memcpy(knobs, read, sizeof knobs);
    return NULL;
}
