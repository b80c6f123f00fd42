/* What Python cannot do fast enough. Compiled on first use by library.py and called through ctypes.
 *
 * Each function is written after a Python one that says what it does and that serves where there is
 * no compiler; property tests hold both equal. Nothing here allocates, keeps state or checks what
 * the caller has checked. Lengths are in bytes, times in seconds, unless a name says otherwise.
 *
 *   copying and hashing    mooncake_store/memory/digests.py
 */

#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

/* ---- copying and hashing: xxh3-64 of more than 240 bytes, in pieces that lie in the cache */

#define STRIPE_BYTES 64
#define SECRET_BYTES 192
#define SECRET_STEP 8
#define STRIPES_IN_BLOCK ((SECRET_BYTES - STRIPE_BYTES) / SECRET_STEP)
#define BLOCK_BYTES (STRIPES_IN_BLOCK * STRIPE_BYTES)
#define LANES 8
#define AHEAD_BYTES 4096 /* prefetched; 1,024 and 2,048 were slower (docs/measurements.md) */

static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu,
                      PRIME64_3 = 0x165667B19E3779F9u, PRIME64_4 = 0x85EBCA77C2B2AE63u,
                      PRIME64_5 = 0x27D4EB2F165667C5u, PRIME_AVALANCHE = 0x165667919E3779F9u;

/* The default secret of the specification. */
static const uint8_t SECRET[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef uint64_t lanes_t __attribute__((vector_size(64)));

static inline lanes_t lanes_at(const uint8_t *from) {
    lanes_t lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

static inline uint64_t word_at(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

/* One stripe of 64 bytes into the accumulators. */
static inline lanes_t accumulated(lanes_t sums, lanes_t data, const uint8_t *secret) {
    const lanes_t swapped = {1, 0, 3, 2, 5, 4, 7, 6};
    const lanes_t keyed = data ^ lanes_at(secret);
    sums += __builtin_shuffle(data, swapped);
    return sums + (keyed & 0xFFFFFFFFu) * (keyed >> 32);
}

static inline lanes_t scrambled(lanes_t sums) {
    sums ^= sums >> 47;
    sums ^= lanes_at(SECRET + SECRET_BYTES - STRIPE_BYTES);
    return sums * PRIME32_1;
}

static inline uint64_t folded(uint64_t left, uint64_t right) {
    const unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Written through the cache, or past it (`streams`, to an aligned place): that saves reading what is
 * overwritten, a third of a large copy's traffic. */
static inline __attribute__((always_inline)) void put_stripe(uint8_t *to, lanes_t data,
                                                             int streams) {
#if defined(__AVX512F__)
    if (streams) {
        _mm512_stream_si512((void *)to, (__m512i)data);
        return;
    }
#elif defined(__AVX__)
    if (streams) {
        __m256i halves[2];
        memcpy(halves, &data, sizeof halves);
        _mm256_stream_si256((__m256i *)to, halves[0]);
        _mm256_stream_si256((__m256i *)(to + 32), halves[1]);
        return;
    }
#endif
    (void)streams;
    memcpy(to, &data, sizeof data);
}

/* xxh3-64 of `bytes` (more than 240) at `from`, copied to `to` on the way. What is hashed is what
 * was copied, whoever writes beside; but for what the last stripe reads again, where such a write
 * makes a hash that fits neither. */
static inline __attribute__((always_inline)) uint64_t hash_copied(uint8_t *to, const uint8_t *from,
                                                                  uint64_t bytes, int streams) {
    lanes_t sums = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                    PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const uint64_t blocks = (bytes - 1) / BLOCK_BYTES;
    for (uint64_t block = 0; block < blocks; block++) {
        for (int stripe = 0; stripe < STRIPES_IN_BLOCK; stripe++) {
            const lanes_t data = lanes_at(from + stripe * STRIPE_BYTES);
            __builtin_prefetch(from + stripe * STRIPE_BYTES + AHEAD_BYTES);
            put_stripe(to + stripe * STRIPE_BYTES, data, streams);
            sums = accumulated(sums, data, SECRET + stripe * SECRET_STEP);
        }
        sums = scrambled(sums);
        from += BLOCK_BYTES;
        to += BLOCK_BYTES;
    }
    const uint64_t left = bytes - blocks * BLOCK_BYTES;
    const uint64_t stripes = (left - 1) / STRIPE_BYTES;
    for (uint64_t stripe = 0; stripe < stripes; stripe++) {
        const lanes_t data = lanes_at(from + stripe * STRIPE_BYTES);
        put_stripe(to + stripe * STRIPE_BYTES, data, streams);
        sums = accumulated(sums, data, SECRET + stripe * SECRET_STEP);
    }
    /* It ends with the last byte. */
    const lanes_t last = lanes_at(from + left - STRIPE_BYTES);
    const uint64_t fresh = left - stripes * STRIPE_BYTES;
    memcpy(to + left - fresh, (const uint8_t *)&last + STRIPE_BYTES - fresh, fresh);
    sums = accumulated(sums, last, SECRET + SECRET_BYTES - STRIPE_BYTES - 7);

    uint64_t hash = bytes * PRIME64_1;
    for (int pair = 0; pair < LANES / 2; pair++) {
        const uint8_t *secret = SECRET + 11 + pair * 16;
        hash += folded(sums[2 * pair] ^ word_at(secret), sums[2 * pair + 1] ^ word_at(secret + 8));
    }
    hash ^= hash >> 37;
    hash *= PRIME_AVALANCHE;
    return hash ^ (hash >> 32);
}

static void copy_streamed(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    const uint64_t whole = bytes / STRIPE_BYTES * STRIPE_BYTES;
    for (uint64_t at = 0; at < whole; at += STRIPE_BYTES) {
        __builtin_prefetch(from + at + AHEAD_BYTES);
        put_stripe(to + at, lanes_at(from + at), 1);
    }
    memcpy(to + whole, from + whole, bytes - whole);
}

/* digests.py: `count` blocks of `parts` equal parts (of more than 240 bytes each where they are
 * hashed) are copied. `packed` gets the digests of the parts of all blocks, the highest byte first;
 * 0: nothing is hashed. `streams`: past the cache, where the target is aligned for that. */
void copy_blocks(uint64_t count, uint8_t *const *to, const uint8_t *const *from,
                 uint64_t part_bytes, uint64_t parts, uint64_t *packed, int streams) {
    for (uint64_t block = 0; block < count; block++) {
        const int aligned = streams && (uintptr_t)to[block] % STRIPE_BYTES == 0;
        if (!packed) {
            if (aligned) copy_streamed(to[block], from[block], part_bytes * parts);
            else memcpy(to[block], from[block], part_bytes * parts);
            continue;
        }
        for (uint64_t part = 0; part < parts; part++) {
            uint8_t *there = to[block] + part * part_bytes;
            const uint8_t *here = from[block] + part * part_bytes;
            const uint64_t hash = aligned && (uintptr_t)there % STRIPE_BYTES == 0
                                      ? hash_copied(there, here, part_bytes, 1)
                                      : hash_copied(there, here, part_bytes, 0);
            *packed++ = __builtin_bswap64(hash);
        }
    }
#ifdef __AVX__
    if (streams) _mm_sfence(); /* the copies are there before whoever is told of them */
#endif
}
