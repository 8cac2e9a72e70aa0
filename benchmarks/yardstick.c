// Reference for copies of KV: memcpy of the same pieces and of large pieces, without Python between the pieces.
// `streaming` uses non-temporal stores, which bypass the caches and reach the highest memory bandwidth.
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef struct {
    char **targets, **sources;
    size_t first, last, bytes;
    int streaming;
} Part;

static void copy_piece(char *target, const char *source, size_t bytes, int streaming) {
#if defined(__AVX__)
    if (streaming && !((uintptr_t)target & 31)) {
        size_t done = 0;
        for (; done + 128 <= bytes; done += 128)
            for (size_t lane = 0; lane < 128; lane += 32)
                _mm256_stream_si256((__m256i *)(target + done + lane),
                                    _mm256_loadu_si256((const __m256i *)(source + done + lane)));
        _mm_sfence();
        memcpy(target + done, source + done, bytes - done);
        return;
    }
#endif
    memcpy(target, source, bytes);
}

static void *copy_part(void *argument) {
    Part *part = argument;
    for (size_t piece = part->first; piece < part->last; piece++)
        copy_piece(part->targets[piece], part->sources[piece], part->bytes, part->streaming);
    return NULL;
}

// Copies `number` pieces of `bytes` each, shared out evenly over `threads` (at most 16) threads.
void copy_pieces(char **targets, char **sources, size_t number, size_t bytes, int threads, int streaming) {
    pthread_t workers[16];
    Part parts[16];
    for (int index = 0; index < threads; index++) {
        parts[index] = (Part){targets, sources, number * index / threads, number * (index + 1) / threads, bytes, streaming};
        if (index) pthread_create(&workers[index], NULL, copy_part, &parts[index]);
    }
    copy_part(&parts[0]);
    for (int index = 1; index < threads; index++) pthread_join(workers[index], NULL);
}
