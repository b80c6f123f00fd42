/* Functions that are too slow in Python. Compiled on first use by library.py, called through ctypes.
 *
 * Each function has a Python version, which documents it and which runs where there is no compiler.
 * Property tests verify that both give equal results. Nothing here allocates memory, repeats the
 * caller's checks or keeps state, except the helper threads for copies. Lengths are in bytes, times
 * in seconds, unless a name has another unit.
 *
 *   copying and hashing    mooncake_store/memory/digests.py
 *   a decision             conductor/routing/compiled.py
 *   a batch's forecast     conductor/load/compiled_forecast.py
 *   the torch engine       backends/engine/torch/native_layers.py
 *   the index replica      mooncake_store/memory/index_table.py
 *   headers of slots       mooncake_store/memory/slot_memory.py
 */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#define PAUSE() ((void)0)
#endif

/* ---- copying and hashing: xxh3-64 of more than 240 bytes, in pieces that are in the CPU's cache */

#define STRIPE_BYTES 64
#define SECRET_BYTES 192
#define SECRET_STEP 8
#define STRIPES_IN_BLOCK ((SECRET_BYTES - STRIPE_BYTES) / SECRET_STEP)
#define BLOCK_BYTES (STRIPES_IN_BLOCK * STRIPE_BYTES)
#define LANES 8
#define AHEAD_BYTES 4096 /* prefetched; 1,024 and 2,048 were slower (bench/RESULTS.md) */

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

static inline uint64_t avalanched(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= PRIME_AVALANCHE;
    return hash ^ (hash >> 32);
}

static inline uint64_t mixed(const uint8_t *from, const uint8_t *secret) {
    return folded(word_at(from) ^ word_at(secret), word_at(from + 8) ^ word_at(secret + 8));
}

/* xxh3-64 of 56 bytes: of a slot's header and of an entry of the index replica. Both store the hash
 * in their last word. */
#define FIELDS_BYTES 56

static inline uint64_t hash_fields(const uint8_t *from) {
    uint64_t hash = FIELDS_BYTES * PRIME64_1;
    hash += mixed(from + 16, SECRET + 32) + mixed(from + FIELDS_BYTES - 32, SECRET + 48);
    hash += mixed(from, SECRET) + mixed(from + FIELDS_BYTES - 16, SECRET + 16);
    return avalanched(hash);
}

/* Store through the cache, or past it (`streams`, to an aligned address). A store past the cache need
 * not read the overwritten line, which saves a third of a large copy's memory traffic. */
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

/* Copies `bytes` (more than 240) from `from` to `to` and returns their xxh3-64. The hash is of the
 * copied bytes, even if another writer changes `from` during the copy. Exception: the last stripe
 * reads some bytes again, and a concurrent write there gives a hash that matches neither version. */
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
    /* The last stripe ends with the last byte. */
    const lanes_t last = lanes_at(from + left - STRIPE_BYTES);
    const uint64_t fresh = left - stripes * STRIPE_BYTES;
    memcpy(to + left - fresh, (const uint8_t *)&last + STRIPE_BYTES - fresh, fresh);
    sums = accumulated(sums, last, SECRET + SECRET_BYTES - STRIPE_BYTES - 7);

    uint64_t hash = bytes * PRIME64_1;
    for (int pair = 0; pair < LANES / 2; pair++) {
        const uint8_t *secret = SECRET + 11 + pair * 16;
        hash += folded(sums[2 * pair] ^ word_at(secret), sums[2 * pair + 1] ^ word_at(secret + 8));
    }
    return avalanched(hash);
}

static void copy_streamed(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    const uint64_t whole = bytes / STRIPE_BYTES * STRIPE_BYTES;
    for (uint64_t at = 0; at < whole; at += STRIPE_BYTES) {
        __builtin_prefetch(from + at + AHEAD_BYTES);
        put_stripe(to + at, lanes_at(from + at), 1);
    }
    memcpy(to + whole, from + whole, bytes - whole);
}

/* A copy shared by several threads: each thread takes the next block. */
typedef struct {
    uint64_t next, count;
    uint8_t *const *to;
    const uint8_t *const *from;
    uint64_t part_bytes, parts;
    uint64_t *packed;
    int streams;
} copy_job;

static void copy_block(const copy_job *job, uint64_t block) {
    uint8_t *to = job->to[block];
    const uint8_t *from = job->from[block];
    const uint64_t bytes = job->part_bytes;
    const int aligned = job->streams && (uintptr_t)to % STRIPE_BYTES == 0;
    if (!job->packed) {
        if (aligned) copy_streamed(to, from, bytes * job->parts);
        else memcpy(to, from, bytes * job->parts);
        return;
    }
    uint64_t *packed = job->packed + block * job->parts;
    for (uint64_t part = 0; part < job->parts; part++, to += bytes, from += bytes) {
        const uint64_t hash = aligned && (uintptr_t)to % STRIPE_BYTES == 0
                                  ? hash_copied(to, from, bytes, 1)
                                  : hash_copied(to, from, bytes, 0);
        packed[part] = __builtin_bswap64(hash);
    }
}

static void copy_some(copy_job *job) {
    for (;;) {
        const uint64_t block = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (block >= job->count) break;
        copy_block(job, block);
    }
#ifdef __AVX__
    if (job->streams) _mm_sfence(); /* complete the stores before the job counts as done */
#endif
}

/* A helper thread for copies. A caller reserves the helper (`taken`) and offers it a job. When no block
 * is left, the caller withdraws the offer. So a helper that does not wake up in time, or that does not
 * exist in a forked process, costs nothing. The caller waits only for a helper that is copying. */
typedef struct {
    int taken, pid; /* pid: process in which the thread runs; 0: none yet */
    copy_job *offered, *copied;
    uint32_t calls, ends; /* futexes: a new offer, a finished job */
} __attribute__((aligned(64))) helper_t;

#define HELPERS_MAX 7
#define SPINS 4000 /* polls of a helper that is copying, before the caller sleeps */

static helper_t HELPERS[HELPERS_MAX];
static const int OWN_SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

static void futex_wait(uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
}

static void futex_wake(uint32_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
}

/* A helper serves all threads, so it takes affinity and priority of the process, not of its creator. */
static void be_as_process(void) {
    cpu_set_t cores;
    if (!sched_getaffinity(getpid(), sizeof cores, &cores))
        sched_setaffinity(0, sizeof cores, &cores);
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, getpid()));
}

static void *help(void *data) {
    helper_t *self = data;
    prctl(PR_SET_NAME, "store-copy");
    be_as_process();
    for (;;) {
        const uint32_t calls = __atomic_load_n(&self->calls, __ATOMIC_ACQUIRE);
        copy_job *job = __atomic_exchange_n(&self->offered, 0, __ATOMIC_ACQ_REL);
        if (!job) {
            futex_wait(&self->calls, calls);
            continue;
        }
        copy_some(job);
        __atomic_store_n(&self->copied, job, __ATOMIC_RELEASE);
        futex_wake(&self->ends);
    }
    return 0;
}

/* True if the helper's thread runs; starts it if needed. Signals are left to the program's threads.
 * Exception: signals of a thread's own faults, which would kill the process silently if blocked. */
static int is_running(helper_t *helper) {
    const int pid = getpid();
    if (helper->pid == pid) return 1;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    for (unsigned at = 0; at < sizeof OWN_SIGNALS / sizeof *OWN_SIGNALS; at++)
        sigdelset(&all, OWN_SIGNALS[at]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&thread, 0, help, helper);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    if (failed) return 0;
    pthread_detach(thread);
    helper->pid = pid;
    return 1;
}

static int helps(helper_t *helper, copy_job *job) {
    int nobody = 0;
    if (!__atomic_compare_exchange_n(&helper->taken, &nobody, 1, 0, __ATOMIC_ACQUIRE,
                                     __ATOMIC_RELAXED))
        return 0;
    helper->copied = 0;
    __atomic_store_n(&helper->offered, job, __ATOMIC_RELEASE);
    if (!is_running(helper)) {
        __atomic_store_n(&helper->offered, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&helper->taken, 0, __ATOMIC_RELEASE);
        return 0;
    }
    futex_wake(&helper->calls);
    return 1;
}

/* Withdraw the offer. On return the helper has finished the job or will never start it. */
static void leave(helper_t *helper, copy_job *job) {
    if (__atomic_exchange_n(&helper->offered, 0, __ATOMIC_ACQ_REL) != job) {
        for (int spin = 0;; spin++) {
            const uint32_t ends = __atomic_load_n(&helper->ends, __ATOMIC_ACQUIRE);
            if (__atomic_load_n(&helper->copied, __ATOMIC_ACQUIRE) == job) break;
            if (spin >= SPINS) futex_wait(&helper->ends, ends);
            else PAUSE();
        }
    }
    __atomic_store_n(&helper->taken, 0, __ATOMIC_RELEASE);
}

/* digests.py: copies `count` blocks of `parts` equal parts each. Hashed parts have more than 240 bytes.
 * The calling thread and all free helpers copy, at most `threads` in total. `packed` receives the
 * big-endian digests of the parts of all blocks; 0: no hashing. `streams`: store past the cache where
 * the target is aligned. */
void copy_blocks(uint64_t count, uint8_t *const *to, const uint8_t *const *from,
                 uint64_t part_bytes, uint64_t parts, uint64_t *packed, int streams,
                 uint64_t threads) {
    copy_job job = {0, count, to, from, part_bytes, parts, packed, streams};
    helper_t *with[HELPERS_MAX];
    uint64_t helpers = 0;
    if (threads > count) threads = count;
    for (int at = 0; at < HELPERS_MAX && helpers + 1 < threads; at++)
        if (helps(&HELPERS[at], &job)) with[helpers++] = &HELPERS[at];
    copy_some(&job);
    for (uint64_t at = 0; at < helpers; at++) leave(with[at], &job);
}

/* ---- routing decision: choose a prefill and a decode worker. Computes the terms of all workers, the
 * blocks that each would fetch, and the best pair, as conductor/routing/{fetching,routing}.py do with
 * numpy: the same operations on each element, in the same order. Sums add the workers in order. */

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define SOURCES_MAX 4
#define PARTNERS_MAX 64

enum cost { COST_QUEUE, COST_START, COST_START_AND_OTHERS };
enum fetch { FETCH_NEVER, FETCH_THRESHOLD, FETCH_TIMES };

/* A source of a prefix. `path_s`: seconds per block to each prefill worker, then the latencies to each
 * prefill worker. */
typedef struct {
    const double *path_s;
    double blocks, dram_blocks, wait_s;
} source_t;

/* Every member has 8 bytes; compiled.py sets each of them. */
typedef struct {
    /* the fleet: columns of pool.py, valid until the set of workers changes */
    int64_t prefills, decodes, has_groups, has_one_block_size;
    const double *ratio, *base_s, *per_token_s, *half_pair_s, *block_tokens, *block_bytes;
    const double *busy_until_s, *unattributed_until_s, *head_key_s, *half_step_s, *waiting_s, *rank;
    const int64_t *length;
    const double *keys_s, *work_s; /* [position][worker] */
    const uint8_t *has_room, *is_beside_decode;
    const double *others, *hops_s, *chunk_tokens; /* for pipeline groups */
    const double *beside_share, *beside_from_tokens; /* for workers with layer-wise prefill */
    const int64_t *node;           /* by prefill worker: the first prefill worker on the same node */
    const double *const *path_s;   /* from that node to each decode worker; 0: not filled in yet */
    /* decode workers on p's node: own[own_from[p]] .. own[own_from[p+1]] */
    const int64_t *own_from, *own;
    const double *decode_per_token_s, *decode_step_s, *pages_free, *decode_rank,
        *decode_block_tokens;
    double tie_ratio, tie_s, ssd_bytes_per_s, balancing_threshold, eviction_cost_share, requests_rank;
    int64_t must_pay, finalists_max;
    /* columns that the functions below compute */
    double *queue_s, *wait_s, *fetch_s, *transfer_s, *prefill_s, *fill_s, *delay_s, *start_s,
        *eviction_cost_s, *beside_s;
    int64_t *source;
    uint8_t *decode_has_room;
    double *busy_s, *behind, *own_s, *least_s, *cost_s, *decode_cost_s, *decode_whole_s;
    int64_t *candidates;
    uint8_t *is_choice;
    /* the request */
    int64_t cost, fetch, is_blind, spares_others, wants_pair;
    const double *blocks, *dram_blocks; /* on each prefill worker's node; equal if none is on SSD */
    const double *full;                 /* 1 if the node's memory is full; null: no node's is */
    const uint8_t *is_prefill, *is_decode, *may_join;
    const uint8_t *rooms; /* by decode worker: decode_has_room, or the caller's column */
    double now_s, prompt_tokens, longest_tokens, spread, stretch, wait_s_max, ttft_limit_s, near_s,
        far_s;
    int64_t sources;
    source_t sources_of[SOURCES_MAX];
    /* the decision */
    int64_t first, prefill, decode;
    double backlog_s; /* of all eligible prefill workers */
    struct { /* of the pair */
        double handover_s, blocks, dram_blocks;
        int64_t source;
        double queue_s, wait_s, fetch_s, transfer_s, prefill_s, fill_s, delay_s, eviction_cost_s;
    } pair;
} decision_t;

#define LANES_OF_DOUBLES 16
/* Columns do not overlap, and members of `d` are copied before the loop, so rows are independent. */
#define EACH(row, count) _Pragma("GCC ivdep") for (int64_t row = 0; row < (count); row++)

static double least_of(const double *values, int64_t count) {
    double lanes[LANES_OF_DOUBLES], least = __builtin_inf();
    int64_t at = 0;
    for (int lane = 0; lane < LANES_OF_DOUBLES; lane++) lanes[lane] = __builtin_inf();
    for (; at + LANES_OF_DOUBLES <= count; at += LANES_OF_DOUBLES)
        for (int lane = 0; lane < LANES_OF_DOUBLES; lane++)
            lanes[lane] = MIN(values[at + lane], lanes[lane]);
    for (int lane = 0; lane < LANES_OF_DOUBLES; lane++) least = MIN(lanes[lane], least);
    for (; at < count; at++) least = MIN(values[at], least);
    return least;
}

/* Of the choices with values up to the limit, the one of least rank; of equal ranks, the first. If all
 * values are NaN, which valid input never causes, the first row that may be chosen. */
static int64_t best_ranked(const double *values, double limit, const double *rank,
                           const uint8_t *is_choice, int64_t count) {
    int64_t best = -1;
    for (int64_t from = 0; from < count; from += LANES_OF_DOUBLES) {
        const int64_t end = MIN(from + LANES_OF_DOUBLES, count);
        if (end - from == LANES_OF_DOUBLES) {
            int64_t within = 0;
            for (int lane = 0; lane < LANES_OF_DOUBLES; lane++)
                within |= values[from + lane] <= limit;
            if (!within) continue;
        }
        for (int64_t row = from; row < end; row++)
            if (is_choice[row] && values[row] <= limit && (best < 0 || rank[row] < rank[best]))
                best = row;
    }
    for (int64_t row = 0; best < 0; row++)
        if (is_choice[row]) best = row;
    return best;
}

/* PrefillPool.fill_s */
static double fill_of(const decision_t *d, int64_t row, double cached) {
    const double *others = d->others + 3 * row;
    const double last = MIN(d->prompt_tokens - cached, d->chunk_tokens[row]);
    const double found =
        others[0] + last * (others[1] + others[2] * (d->prompt_tokens - last / 2));
    return (found + d->hops_s[row]) * d->ratio[row];
}

/* PrefillPool.position: for each worker, the work that is served before the request, and the number of
 * requests that it overtakes. */
static void positions(decision_t *d) {
    const decision_t in = *d;
    EACH(row, in.prefills) {
        const double key_s = MIN(in.prefill_s[row] * in.stretch, in.wait_s_max) + in.now_s;
        const double others = in.unattributed_until_s[row] - in.now_s, others_s = MAX(others, 0.0);
        const double head_s = in.busy_s[row] - others_s;
        const int is_first = key_s < in.head_key_s[row];
        const double first_s = MIN(head_s, in.half_step_s[row]) + others_s;
        in.behind[row] = is_first ? 1.0 : 0.0;
        in.wait_s[row] = (is_first ? first_s : in.busy_s[row]) * in.ratio[row];
    }
    for (int64_t row = 0; row < in.prefills; row++) {
        const int64_t length = in.length[row]; /* requests behind the head; usually 0 */
        if (!length) continue;
        const double key_s = MIN(in.prefill_s[row] * in.stretch, in.wait_s_max) + in.now_s;
        int64_t ahead = 0;
        for (int64_t at = 0; at < length; at++) ahead += in.keys_s[at * in.prefills + row] <= key_s;
        in.behind[row] += (double)(length - ahead);
        if (key_s >= in.head_key_s[row])
            in.wait_s[row] = (in.busy_s[row] + in.work_s[ahead * in.prefills + row]) * in.ratio[row];
    }
}

/* make_plans, as far as nothing is fetched. */
static void own_plans(decision_t *d) {
    const decision_t in = *d;
    const double tokens = in.prompt_tokens;
    EACH(row, in.prefills) {
        const double busy = in.busy_until_s[row] - in.now_s, busy_s = MAX(busy, 0.0);
        in.busy_s[row] = busy_s;
        in.queue_s[row] = (busy_s + in.waiting_s[row]) * in.ratio[row];
    }
    EACH(row, in.prefills) {
        const double cached = MIN(in.blocks[row] * in.block_tokens[row], tokens - 1.0);
        const double pair_s = in.half_pair_s[row] * (cached + tokens);
        in.prefill_s[row] = (pair_s + in.per_token_s[row]) * (tokens - cached) + in.base_s[row];
        in.fetch_s[row] = in.fill_s[row] = in.eviction_cost_s[row] = in.beside_s[row] = 0.0;
        in.source[row] = -1;
    }
    if (in.has_groups)
        for (int64_t row = 0; row < in.prefills; row++) {
            const double cached = MIN(in.blocks[row] * in.block_tokens[row], tokens - 1.0);
            in.fill_s[row] = fill_of(d, row, cached);
            in.prefill_s[row] += in.fill_s[row];
        }
    if (in.dram_blocks != in.blocks)
        EACH(row, in.prefills)
            in.fetch_s[row] = (in.blocks[row] - in.dram_blocks[row]) *
                              (in.block_bytes[row] / in.ssd_bytes_per_s);
}

/* _take_the_quickest for one source, by threshold (`is_threshold`) or by times. `is_plain`: no groups,
 * no SSD, no full memory. */
static inline __attribute__((always_inline)) void take_from(decision_t *d, int64_t number,
                                                            const int is_threshold,
                                                            const int is_plain) {
    const decision_t in = *d;
    const source_t from = in.sources_of[number];
    const double *latency_s = from.path_s + in.prefills;
    const double tokens = in.prompt_tokens, longest = in.sources_of[0].blocks;
    const double on_ssd = from.blocks - from.dram_blocks;
    const double wanted_below = is_threshold ? longest / in.balancing_threshold : from.blocks;
    EACH(row, in.prefills) {
        const double blocks = in.blocks[row], block_s = from.path_s[row];
        const double cached = MIN(from.blocks * in.block_tokens[row], tokens - 1.0);
        const double pair_s = in.half_pair_s[row] * (cached + tokens);
        double work_s = (pair_s + in.per_token_s[row]) * (tokens - cached) + in.base_s[row];
        const double missing = from.blocks - blocks;
        double fixed_s = latency_s[row] + from.wait_s, fill_s = 0.0, eviction_cost_s = 0.0;
        if (!is_plain) {
            if (in.has_groups) work_s += fill_s = fill_of(d, row, cached);
            if (in.dram_blocks != in.blocks)
                fixed_s += (blocks - in.dram_blocks[row]) *
                           (in.block_bytes[row] / in.ssd_bytes_per_s);
        }
        double fetch_s = missing * block_s + fixed_s;
        if (!is_plain && on_ssd != 0.0) {
            const double slow = MIN(missing, on_ssd);
            const double ssd_s = in.block_bytes[row] / in.ssd_bytes_per_s;
            fetch_s = ((missing - slow) * block_s + slow * MAX(block_s, ssd_s)) + fixed_s;
        }
        const int is_in_memory = is_plain || (on_ssd == 0.0 && blocks == in.dram_blocks[row]);
        const int is_beside = !is_threshold && is_in_memory && in.beside_from_tokens[row] < tokens;
        const double beside_s = is_beside ? in.beside_share[row] * work_s : 0.0;
        const double hidden_s = in.wait_s[row] + beside_s;
        double total_s = (is_threshold ? fetch_s : MAX(hidden_s, fetch_s)) + (work_s - beside_s);
        if (!is_plain && !is_threshold && in.full) {
            eviction_cost_s = in.eviction_cost_share * (in.own_s[row] - work_s) * in.full[row];
            total_s += eviction_cost_s;
        }
        const int is_better = (blocks < wanted_below) & (total_s < in.least_s[row]);
        in.least_s[row] = is_better ? total_s : in.least_s[row];
        in.fetch_s[row] = is_better ? fetch_s : in.fetch_s[row];
        in.prefill_s[row] = is_better ? work_s : in.prefill_s[row];
        in.source[row] = is_better ? number : in.source[row];
        in.beside_s[row] = is_better ? beside_s : in.beside_s[row];
        if (!is_plain) {
            in.eviction_cost_s[row] = is_better ? eviction_cost_s : in.eviction_cost_s[row];
            in.fill_s[row] = is_better ? fill_s : in.fill_s[row];
        }
    }
}

static void fetches(decision_t *d) {
    const decision_t in = *d;
    const int is_threshold = in.fetch == FETCH_THRESHOLD, has_ssd = in.dram_blocks != in.blocks;
    const double tokens = in.prompt_tokens, longest = in.sources_of[0].blocks;
    EACH(row, in.prefills) {
        const double own_s = in.prefill_s[row], fetch_s = in.fetch_s[row], wait_s = in.wait_s[row];
        in.own_s[row] = own_s;
        in.least_s[row] = (is_threshold ? fetch_s : MAX(wait_s, fetch_s)) + own_s;
    }
    if (is_threshold && !in.must_pay)
        EACH(row, in.prefills) {
            const double cached = MIN(in.blocks[row] * in.block_tokens[row], tokens - 1.0);
            const int is_more = cached < MIN(longest * in.block_tokens[row], tokens - 1.0);
            in.least_s[row] = is_more ? __builtin_inf() : -__builtin_inf();
        }
    for (int64_t number = 0; number < in.sources; number++) {
        const source_t *from = &in.sources_of[number];
        const int is_plain =
            !(in.has_groups || has_ssd || in.full) && from->blocks == from->dram_blocks;
        if (is_threshold && is_plain) take_from(d, number, 1, 1);
        else if (is_threshold) take_from(d, number, 1, 0);
        else if (is_plain) take_from(d, number, 0, 1);
        else take_from(d, number, 0, 0);
    }
}

/* Options._meet_prefills: the terms of every prefill worker. */
static void meet_prefills(decision_t *d) {
    const decision_t in = *d;
    double sum_s = 0.0;
    int64_t in_question = 0;
    own_plans(d);
    if (in.sources) {
        if (in.fetch == FETCH_TIMES) positions(d);
        fetches(d);
    }
    positions(d);
    EACH(row, in.prefills) {
        const double fetch_s = in.fetch_s[row], wait_s = in.wait_s[row];
        const double late_s = (fetch_s - wait_s) - in.beside_s[row];
        const double seen_s = MAX(late_s, 0.0);
        const double transfer_s = in.fetch == FETCH_TIMES ? seen_s : fetch_s;
        in.transfer_s[row] = transfer_s;
        in.start_s[row] = (wait_s + transfer_s) + in.prefill_s[row];
        const double delay_s = (in.prefill_s[row] - in.fill_s[row]) * in.behind[row];
        in.delay_s[row] = in.spares_others ? delay_s : 0.0;
        in_question += in.is_prefill[row];
    }
    for (int64_t row = 0; row < in.prefills; row++)
        sum_s += in.is_prefill[row] ? in.queue_s[row] : 0.0;
    d->backlog_s = sum_s / (double)in_question;
}

/* Policy.cost */
static void costs(const decision_t *d) {
    const decision_t in = *d;
    if (in.cost == COST_QUEUE) EACH(row, in.prefills) in.cost_s[row] = in.queue_s[row];
    else if (in.cost == COST_START) EACH(row, in.prefills) in.cost_s[row] = in.start_s[row];
    else
        EACH(row, in.prefills)
            in.cost_s[row] = (in.start_s[row] + in.delay_s[row]) + in.eviction_cost_s[row];
}

static double within(const decision_t *d, double least_s) {
    return least_s + MAX(least_s * d->tie_ratio, d->tie_s);
}

/* Options._first: the prefill worker that the policy prefers. Returns the least cost. */
static double choose_first(decision_t *d) {
    const decision_t in = *d;
    const int64_t count = in.prefills;
    int64_t choices = 0;
    EACH(row, count) choices += in.is_choice[row] = in.is_prefill[row] & in.has_room[row];
    if (!choices) memcpy(in.is_choice, in.is_prefill, (size_t)count);
    costs(d);
    if (in.spares_others) { /* a choice that spares others must still meet this request's limit */
        int64_t in_time = 0;
        EACH(row, count) in_time += in.is_choice[row] & (in.start_s[row] <= in.ttft_limit_s);
        if (in_time)
            EACH(row, count) in.is_choice[row] &= in.start_s[row] <= in.ttft_limit_s;
        else
            EACH(row, count) in.cost_s[row] = in.start_s[row];
    }
    EACH(row, count) in.cost_s[row] = in.is_choice[row] ? in.cost_s[row] : __builtin_inf();
    const double least_s = least_of(in.cost_s, count);
    d->first = best_ranked(in.cost_s, within(d, least_s), in.rank, in.is_choice, count);
    return least_s;
}

/* Pool.blocks */
static inline double blocks_at(const decision_t *d, int64_t row, double tokens) {
    return __builtin_ceil(tokens / d->decode_block_tokens[row]);
}

/* Options._partner: the decode worker for a prefill worker. Returns the least cost after prefill. */
static double choose_partner(const decision_t *d, const uint8_t *joinable, int64_t prefill,
                             int64_t *decode) {
    const decision_t in = *d;
    const int64_t count = in.decodes;
    const double *block_s = in.path_s[prefill], *latency_s = block_s + count, *rank = in.decode_rank;
    const double blocks = blocks_at(d, 0, in.prompt_tokens), each = 1.0 / in.spread;
    if (in.has_one_block_size)
        EACH(row, count)
            in.decode_cost_s[row] =
                in.decode_whole_s[row] + (block_s[row] * blocks + latency_s[row]) * each;
    else
        EACH(row, count) {
            const double blocks_there = blocks_at(&in, row, in.prompt_tokens);
            in.decode_cost_s[row] =
                in.decode_whole_s[row] + (block_s[row] * blocks_there + latency_s[row]) * each;
        }
    EACH(row, count)
        in.decode_cost_s[row] = joinable[row] ? in.decode_cost_s[row] : __builtin_inf();
    const double least_s = least_of(in.decode_cost_s, count);
    const double limit_s = least_s * (1.0 + in.tie_ratio);
    int64_t best = best_ranked(in.decode_cost_s, limit_s, rank, joinable, count);
    double best_rank = rank[best];
    for (int64_t at = in.own_from[prefill]; at < in.own_from[prefill + 1]; at++) {
        const int64_t row = in.own[at];
        const double own_rank = rank[row] - in.requests_rank;
        if (joinable[row] && in.decode_cost_s[row] <= limit_s &&
            (own_rank < best_rank || (own_rank == best_rank && row < best))) {
            best = row;
            best_rank = own_rank;
        }
    }
    *decode = best;
    return in.spread * least_s;
}

/* Options._rooms for reserved loads, and the step of each batch with the request in it. */
static void meet_decodes(decision_t *d) {
    const decision_t in = *d;
    const int64_t count = in.decodes;
    const double blocks = blocks_at(d, 0, in.longest_tokens);
    EACH(row, count)
        in.decode_whole_s[row] =
            in.decode_per_token_s[row] * in.prompt_tokens + in.decode_step_s[row];
    EACH(row, count) {
        const double wanted = in.has_one_block_size ? blocks : blocks_at(&in, row, in.longest_tokens);
        in.decode_has_room[row] = (in.pages_free[row] >= wanted) & in.may_join[row];
    }
}

/* Options._handover_s */
static double handover_of(const decision_t *d, int64_t prefill, int64_t decode) {
    const double *block_s = d->path_s[prefill];
    const double blocks = blocks_at(d, decode, d->prompt_tokens);
    return block_s[decode] * blocks + block_s[d->decodes + decode];
}

/* Options._pairing. Returns -1, or the row of a prefill worker whose node's path is missing. */
static int64_t choose(decision_t *d) {
    const double least_s = choose_first(d), step_s = least_of(d->decode_whole_s, d->decodes);
    const int64_t first = d->first;
    /* A pair is chosen even if no decode worker has room. */
    int64_t rooms = 0;
    EACH(row, d->decodes) rooms += d->rooms[row];
    const uint8_t *joinable = rooms ? d->rooms : d->is_decode;
    if (!d->path_s[first]) return first;
    const double rest_s = choose_partner(d, joinable, first, &d->decode);
    d->prefill = first;
    if (d->is_blind) return -1;
    const double tie_s = within(d, least_s) - least_s;
    const double steps_s = d->spread * step_s, nearest_s = MIN(d->near_s, d->far_s);
    double total_s = d->cost_s[first] + rest_s;
    if (total_s - tie_s <= least_s + steps_s + nearest_s) return -1;
    /* Another prefill worker may be better once the cost after prefill counts too. Candidates are the
     * workers whose lower bound permits that, in the order of their bounds. */
    double *bound_s = d->own_s, *found_s = d->least_s; /* reuse columns that are no longer needed */
    int64_t *rows = d->candidates, count = 0;
    for (int64_t row = 0; row < d->prefills; row++) {
        const double after_s = steps_s + (d->is_beside_decode[row] ? nearest_s : d->far_s);
        bound_s[row] = after_s + d->cost_s[row];
        if (bound_s[row] < total_s - tie_s) rows[count++] = row;
    }
    int64_t nodes[PARTNERS_MAX], partners[PARTNERS_MAX], known = 1, found = 1;
    double rests_s[PARTNERS_MAX];
    nodes[0] = d->node[first], partners[0] = d->decode, rests_s[0] = rest_s;
    const double first_s = total_s;
    int64_t *of = d->candidates + d->prefills, *with = of + d->prefills + 1;
    of[0] = first, with[0] = d->decode, found_s[0] = total_s;
    for (int64_t at = 0; at < count; at++) {
        int64_t next = at; /* of equal bounds the first row; other rows keep their order */
        for (int64_t other = at + 1; other < count; other++)
            if (bound_s[rows[other]] < bound_s[rows[next]]) next = other;
        const int64_t row = rows[next];
        memmove(rows + at + 1, rows + at, sizeof(*rows) * (size_t)(next - at));
        rows[at] = row;
        if (bound_s[row] >= total_s - tie_s) break;
        int64_t partner = 0;
        while (partner < known && nodes[partner] != d->node[row]) partner++;
        if (partner == known) {
            if (known >= d->finalists_max) break;
            if (!d->path_s[row]) return row;
            rests_s[known] = choose_partner(d, joinable, row, &partners[known]);
            nodes[known++] = d->node[row];
        }
        if (d->start_s[row] + handover_of(d, row, partners[partner]) > d->ttft_limit_s) continue;
        of[found] = row, with[found] = partners[partner];
        found_s[found] = d->cost_s[row] + rests_s[partner];
        total_s = MIN(found_s[found], total_s);
        found++;
    }
    if (first_s <= total_s + tie_s) return -1;
    int64_t best = -1;
    for (int64_t at = 1; at < found; at++)
        if (found_s[at] <= total_s + tie_s &&
            (best < 0 || d->rank[of[at]] < d->rank[of[best]]))
            best = at;
    if (best < 0) return -1; /* its costs are NaN: keep the first pair */
    d->prefill = of[best];
    d->decode = with[best];
    return -1;
}

/* Options.prefill */
static void describe(decision_t *d) {
    const int64_t row = d->prefill;
    const double key_s = MIN(d->prefill_s[row] * d->stretch, d->wait_s_max) + d->now_s;
    double behind = key_s < d->head_key_s[row];
    for (int64_t at = 0; at < d->length[row]; at++)
        behind += d->keys_s[at * d->prefills + row] > key_s;
    d->pair.handover_s = handover_of(d, row, d->decode);
    d->pair.blocks = d->blocks[row];
    d->pair.dram_blocks = d->dram_blocks[row];
    d->pair.source = d->source[row];
    d->pair.queue_s = d->queue_s[row];
    d->pair.wait_s = d->wait_s[row];
    d->pair.fetch_s = d->fetch_s[row];
    d->pair.transfer_s = d->transfer_s[row];
    d->pair.prefill_s = d->prefill_s[row];
    d->pair.fill_s = d->fill_s[row];
    d->pair.delay_s = (d->prefill_s[row] - d->fill_s[row]) * behind;
    d->pair.eviction_cost_s = d->eviction_cost_s[row];
}

/* The best pair; call `decide` before. Returns -1, or the row of a prefill worker for whose node the
 * caller must fill in path_s before it calls again. */
int64_t choose_pair(decision_t *d) {
    const int64_t missing = choose(d);
    if (missing < 0) describe(d);
    return missing;
}

/* Computes the terms of all workers for the request, and the best pair if `wants_pair`. */
int64_t decide(decision_t *d) {
    meet_prefills(d);
    meet_decodes(d);
    return d->wants_pair ? choose_pair(d) : -1;
}

/* ---- a batch's forecast: conductor/load/decode_forecast.py for one request or one worker */

#define MOMENTS 16 /* of the grid */
#define SHOWN 3    /* sequences, context tokens, pages; their variances follow */
#define SUMS (2 * SHOWN)

/* Every member has 8 bytes. */
typedef struct {
    /* of one request */
    const double *grid_s, *edges, *curve;
    int64_t edges_count, is_joined;
    /* sums of the request, and of all requests in its state (coming or joined) */
    double (*request)[SUMS], (*stage)[SUMS];
    double since_s, step_s, context_tokens, pages, tokens_max;
} forecast_request_t;

typedef struct {
    /* of one worker */
    const double (*coming)[SUMS], (*joined)[SUMS], *most, *unattributed_alive;
    double (*peaks)[SHOWN];
    double sigma, share, unattributed[SHOWN];
} forecast_worker_t;

/* DecodeForecast._count */
void forecast_count(const forecast_request_t *of) {
    const int64_t last = of->edges_count - 1;
    for (int at = 0; at < MOMENTS; at++) {
        const double tokens = (of->grid_s[at] + of->since_s) / of->step_s;
        double alive = 0.0;
        if (tokens < of->tokens_max && (of->is_joined || tokens >= 0.0)) {
            int64_t right = 1;
            while (right < last && of->edges[right] <= tokens) right++;
            const double edge = of->edges[right - 1], low = of->curve[right - 1];
            const double part = MIN((tokens - edge) / (of->edges[right] - edge), 1.0);
            alive = low + MAX(part, 0.0) * (of->curve[right] - low);
        }
        const double sums[SHOWN] = {alive, alive * (of->context_tokens + MAX(tokens, 0.0)),
                                    alive * of->pages};
        const double odds = alive > 0.0 ? (1.0 - alive) / alive : 0.0;
        for (int sum = 0; sum < SHOWN; sum++) {
            of->request[at][sum] = sums[sum];
            of->request[at][SHOWN + sum] = sums[sum] * sums[sum] * odds;
        }
        for (int sum = 0; sum < SUMS; sum++) of->stage[at][sum] += of->request[at][sum];
    }
}

/* DecodeForecast.settle */
void forecast_settle(const forecast_worker_t *of) {
    double peak[SHOWN];
    for (int sum = 0; sum < SHOWN; sum++) peak[sum] = -__builtin_inf();
    for (int at = MOMENTS - 1; at >= 0; at--) {
        for (int sum = 0; sum < SHOWN; sum++) {
            const double mean = of->coming[at][sum] + of->share * of->joined[at][sum];
            const double variance =
                of->coming[at][SHOWN + sum] + of->share * of->joined[at][SHOWN + sum];
            const double doubt = of->sigma * __builtin_sqrt(MAX(variance, 0.0));
            const double raised = MAX(mean, 0.0) + doubt, most = MAX(of->most[sum], 0.0);
            const double total = MIN(raised, most) +
                                 of->unattributed_alive[at] * of->unattributed[sum];
            peak[sum] = MAX(total, peak[sum]);
            of->peaks[at][sum] = peak[sum];
        }
    }
    memcpy(of->peaks[MOMENTS], of->peaks[MOMENTS - 1], sizeof peak);
}

/* ---- torch engine: norms, rotary embedding, gates, attention of decode steps over paged KV
 *
 * Numbers are float32. Weights of matrices may be bfloat16 (the upper half of a float32). K and V in
 * pages may be float32, bfloat16 or fp8 (e4m3: sign, 4 bits of exponent, 3 of mantissa). Vectors are AVX-512;
 * without it torch computes (engine_vectors). Any number of threads run a function together, started by OpenMP's
 * GOMP_parallel, or one thread alone. All take their work from one counter, `next`. */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAS_VECTORS 1
#else
#define HAS_VECTORS 0
#endif

#if HAS_VECTORS && defined(__AVX512BF16__)
#define HAS_PRODUCTS 1 /* products of bfloat16 pairs, summed in float32 */
#else
#define HAS_PRODUCTS 0
#endif

int engine_vectors(void) { return HAS_VECTORS; }

enum { IS_FLOAT32, IS_BF16, IS_FP8 }; /* dtype of a job's `memory` */

typedef struct {
    int64_t next, rows, width, row_stride, out_stride; /* strides in scalars */
    const float *from, *weight;                        /* weight: null for none */
    float *out;
    float epsilon;
} rows_job;

typedef struct {
    int64_t next, rows, heads, kv_heads, head_dim, row_stride;
    float *qkv;                /* q, k and v heads of each row; q and k are rotated in place */
    const float *table;        /* [positions, 2, head_dim] */
    const int64_t *positions;  /* of each row */
    const float *norm;         /* [heads + kv_heads, head_dim], or 0 */
    void *memory;              /* target of k and v, in rows of head_dim scalars */
    const int64_t *token_rows; /* [tokens, 2 * kv_heads]; rows from `tokens` on are not stored */
    int64_t tokens, memory_is;
    float epsilon;
} rotate_job;

typedef struct {
    int64_t next, works, kv_heads, shared, head_dim, block_tokens, page_stride; /* in scalars */
    const void *memory;         /* this layer's first K head of page 0 */
    const int64_t *pages;       /* of all sequences */
    const int64_t *page_starts; /* a sequence's first index in `pages` */
    const int64_t *contexts;    /* tokens that a sequence attends to */
    const float *queries;       /* [sequences, heads, head_dim] */
    int64_t query_stride;       /* scalars from one sequence to the next */
    float *out;                 /* [sequences, heads * head_dim] */
    int64_t memory_is;
    float scale;
} attend_job;

#if HAS_VECTORS
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")
#define LANE_COUNT 16
#define SHARED_MAX 4     /* query heads at once, so that their sums stay in registers */
#define TILE_TOKENS 64   /* tokens whose scores are kept until their values are summed */
#define ROWS_AT_ONCE 4

INLINE __mmask16 lanes_left(int64_t left) {
    return left >= LANE_COUNT ? 0xFFFF : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

INLINE __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE __m512 loaded(const float *base, int64_t at, __mmask16 mask) {
    return _mm512_maskz_loadu_ps(mask, base + at);
}

/* Round to nearest, ties to even, as torch does. */
INLINE __m256i narrowed(__m512 numbers) {
    const __m512i bits = _mm512_castps_si512(numbers);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_blend_epi32(is_nan, _mm512_srli_epi32(up, 16),
                                                 _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(kept);
}

INLINE void stored(float *base, int64_t at, __mmask16 mask, __m512 numbers) {
    _mm512_mask_storeu_ps(base + at, mask, numbers);
}

/* An fp8 has the bits of the upper half of a float16 with another exponent bias. Read as a float16 it
 * is 1/256 of its value, which the caller corrects by FP8_SCALE. NaN is not recognised. */
#define FP8_SCALE 256.0f

INLINE __m512 fp8_widened(__m128i bytes) {
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16((short)0xBFFF)));
}

/* K or V of the pages; fp8 values as 1/256 of themselves. */
INLINE __m512 kept(const void *base, int64_t at, __mmask16 mask, const int memory_is) {
    if (memory_is == IS_FP8)
        return fp8_widened(_mm_maskz_loadu_epi8(mask, (const uint8_t *)base + at));
    if (memory_is == IS_BF16)
        return widened(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)base + at));
    return loaded(base, at, mask);
}

/* Round to the nearest fp8, ties to even; larger values become the maximum, 448. */
INLINE __m128i fp8_narrowed(__m512 numbers) {
    const __m512i bits = _mm512_castps_si512(numbers);
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    const __m512 size = _mm512_min_ps(_mm512_abs_ps(numbers), _mm512_set1_ps(448.0f));
    const __m512i raw = _mm512_castps_si512(size);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, 20), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(raw, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFFF)));
    const __m512i normal =
        _mm512_sub_epi32(_mm512_srli_epi32(up, 20), _mm512_set1_epi32((127 - 7) << 3));
    /* Below 2^-6 fp8 steps are 2^-9, which is the value of this sum's last bit. */
    const __m512 steps = _mm512_set1_ps(16384.0f);
    const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(size, steps)),
                                           _mm512_castps_si512(steps));
    const __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.015625f), _CMP_LT_OQ);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    __m512i made = _mm512_mask_blend_epi32(is_small, normal, small);
    made = _mm512_mask_blend_epi32(is_nan, made, _mm512_set1_epi32(0x7F));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(made, sign));
}

/* e to the power of x, to about 2 ulp; 0 for very negative x. */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* One head of K or V into the pages. */
INLINE void keep(void *base, int64_t at, const float *from, int64_t dim, const int memory_is) {
    if (memory_is == IS_FLOAT32) {
        memcpy((float *)base + at, from, dim * sizeof *from);
        return;
    }
    for (int64_t i = 0; i < dim; i += LANE_COUNT) {
        const __mmask16 mask = lanes_left(dim - i);
        const __m512 numbers = loaded(from, i, mask);
        if (memory_is == IS_FP8)
            _mm_mask_storeu_epi8((uint8_t *)base + at + i, mask, fp8_narrowed(numbers));
        else
            _mm256_mask_storeu_epi16((uint16_t *)base + at + i, mask, narrowed(numbers));
    }
}

INLINE int64_t taken(int64_t *next, int64_t count) {
    return __atomic_fetch_add(next, count, __ATOMIC_RELAXED);
}

/* One row: x / sqrt(mean(x^2) + epsilon), times a weight if there is one. */
INLINE void normed_row(const float *from, const float *weight, float *out, int64_t width,
                       float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANE_COUNT) {
        const __m512 x = loaded(from, i, lanes_left(width - i));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const float mean = _mm512_reduce_add_ps(squares) / (float)width;
    const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t i = 0; i < width; i += LANE_COUNT) {
        const __mmask16 mask = lanes_left(width - i);
        __m512 x = _mm512_mul_ps(loaded(from, i, mask), scale);
        if (weight) x = _mm512_mul_ps(x, loaded(weight, i, mask));
        stored(out, i, mask, x);
    }
}

/* norm.py: RMS norm of rows. */
void norm_rows(void *data) {
    rows_job *job = data;
    for (;;) {
        const int64_t first = taken(&job->next, ROWS_AT_ONCE);
        if (first >= job->rows) return;
        for (int64_t row = first; row < job->rows && row < first + ROWS_AT_ONCE; row++)
            normed_row(job->from + row * job->row_stride, job->weight,
                       job->out + row * job->out_stride, job->width, job->epsilon);
    }
}

/* feed_forward.py: silu(gate) * up of rows that contain gate, then up. */
void gate_rows(void *data) {
    rows_job *job = data;
    const __m512 one = _mm512_set1_ps(1.0f);
    for (;;) {
        const int64_t first = taken(&job->next, ROWS_AT_ONCE);
        if (first >= job->rows) return;
        for (int64_t row = first; row < job->rows && row < first + ROWS_AT_ONCE; row++)
            for (int64_t i = 0; i < job->width; i += LANE_COUNT) {
                const __mmask16 mask = lanes_left(job->width - i);
                const int64_t at = row * job->row_stride + i;
                const __m512 gate = loaded(job->from, at, mask);
                const __m512 up = loaded(job->from, at + job->width, mask);
                const __m512 below = _mm512_add_ps(
                    one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
                stored(job->out, row * job->out_stride + i, mask,
                       _mm512_mul_ps(_mm512_div_ps(gate, below), up));
            }
    }
}

/* One head in place: x * cos + (x rolled by half) * sin, the sine with rotate_half's sign. */
INLINE void rotated_head(float *head, const float *angles, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANE_COUNT) {
        const __mmask16 mask = lanes_left(half - i);
        const __m512 low = loaded(head, i, mask);
        const __m512 high = loaded(head, half + i, mask);
        const __m512 low_sin = loaded(angles, dim + i, mask);
        const __m512 high_sin = loaded(angles, dim + half + i, mask);
        __m512 first = _mm512_mul_ps(low, loaded(angles, i, mask));
        __m512 second = _mm512_mul_ps(high, loaded(angles, half + i, mask));
        stored(head, i, mask, _mm512_fmadd_ps(high, low_sin, first));
        stored(head, half + i, mask, _mm512_fmadd_ps(low, high_sin, second));
    }
}

INLINE void rotate_rows_to(rotate_job *job, const int memory_is) {
    const int64_t dim = job->head_dim, rotated = job->heads + job->kv_heads;
    for (;;) {
        const int64_t row = taken(&job->next, 1);
        if (row >= job->rows) return;
        float *const heads = job->qkv + row * job->row_stride;
        for (int64_t head = 0; head < rotated; head++) {
            float *const at = heads + head * dim;
            if (job->norm) normed_row(at, job->norm + head * dim, at, dim, job->epsilon);
            rotated_head(at, job->table + job->positions[row] * 2 * dim, dim);
        }
        if (row >= job->tokens) continue;
        const int64_t *rows = job->token_rows + row * 2 * job->kv_heads;
        for (int64_t head = 0; head < 2 * job->kv_heads; head++)
            keep(job->memory, rows[head] * dim, heads + (job->heads + head) * dim, dim, memory_is);
    }
}

/* grouped_attention.py: norms of heads, rotary embedding, K and V into their pages. */
void rotate_rows(void *data) {
    rotate_job *job = data;
    if (job->memory_is == IS_FP8)
        rotate_rows_to(job, IS_FP8);
    else if (job->memory_is == IS_BF16)
        rotate_rows_to(job, IS_BF16);
    else
        rotate_rows_to(job, IS_FLOAT32);
}

INLINE __m512 pairs_added(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

/* For four vectors: each quarter of the result has the sums of that quarter of each vector. */
INLINE __m512 quarter_sums(const __m512 *v) {
    const __m512d left = _mm512_castps_pd(pairs_added(v[0], v[1]));
    const __m512d right = _mm512_castps_pd(pairs_added(v[2], v[3]));
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(left, right)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(left, right)));
}

INLINE __m512 quarters_added(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

/* HEADS query heads of one KV head against all tokens of a sequence; head_dim is at most 16 * VECTORS.
 * Online softmax over tiles of tokens: a larger score rescales the sums so far. */
INLINE void attend_heads(const attend_job *job, int64_t work, int64_t kv_head, int64_t first,
                         const int HEADS, const int VECTORS, const int memory_is) {
    const int64_t dim = job->head_dim, shared = job->shared, block = job->block_tokens;
    const int64_t context = job->contexts[work];
    const int64_t *pages = job->pages + job->page_starts[work];
    const int64_t query_at = work * job->query_stride + (kv_head * shared + first) * dim;
    const int SCALAR_BYTES = memory_is == IS_FP8 ? 1 : memory_is == IS_BF16 ? 2 : 4;
    const float scale = memory_is == IS_FP8 ? job->scale * FP8_SCALE : job->scale;
    __mmask16 masks[8];
    __m512 sums[SHARED_MAX][8], queries[SHARED_MAX][8];
    float scores[SHARED_MAX][TILE_TOKENS] __attribute__((aligned(64)));
    float largest[SHARED_MAX], weights[SHARED_MAX];
    UNROLLED for (int v = 0; v < VECTORS; v++) masks[v] = lanes_left(dim - v * LANE_COUNT);
    UNROLLED for (int h = 0; h < HEADS; h++) {
        largest[h] = -__builtin_inff();
        weights[h] = 0;
        UNROLLED for (int v = 0; v < VECTORS; v++) {
            sums[h][v] = _mm512_setzero_ps();
            queries[h][v] = loaded(job->queries, query_at + h * dim + v * LANE_COUNT, masks[v]);
        }
    }
    for (int64_t at = 0; at < context;) {
        const int64_t in_page = at % block;
        int64_t tokens = block - in_page;
        if (tokens > TILE_TOKENS) tokens = TILE_TOKENS;
        if (tokens > context - at) tokens = context - at;
        const int64_t key_at =
            pages[at / block] * job->page_stride + (kv_head * block + in_page) * dim;
        const int64_t value_at = key_at + job->kv_heads * block * dim;
        /* Prefetch the next tile while this one is computed, because the hardware's own prefetching
         * stops at every 4 KiB page. The target is the L2 cache: L1 allows fewer outstanding lines
         * (bench/RESULTS.md). */
        const int64_t next = at + tokens < context ? at + tokens : at;
        const int64_t next_key_at =
            pages[next / block] * job->page_stride + (kv_head * block + next % block) * dim;
        const char *next_keys = (const char *)job->memory + next_key_at * SCALAR_BYTES;
        const char *next_values = next_keys + job->kv_heads * block * dim * SCALAR_BYTES;
        __m512 tile_largest[SHARED_MAX];
        UNROLLED for (int h = 0; h < HEADS; h++) tile_largest[h] = _mm512_set1_ps(-__builtin_inff());
        for (int64_t group = 0; group < tokens; group += LANE_COUNT) {
            __m512 quarters[SHARED_MAX][4];
            UNROLLED for (int quad = 0; quad < 4; quad++) {
                __m512 products[SHARED_MAX][4];
                UNROLLED for (int i = 0; i < 4; i++) {
                    int64_t token = group + quad * 4 + i;
                    if (token >= tokens) token = tokens - 1; /* do not read past the tile's tokens */
                    const int64_t key = key_at + token * dim;
                    UNROLLED for (int line = 0; line < VECTORS * LANE_COUNT * SCALAR_BYTES; line += 64)
                        __builtin_prefetch(next_keys + token * dim * SCALAR_BYTES + line, 0, 2);
                    UNROLLED for (int h = 0; h < HEADS; h++) products[h][i] = _mm512_setzero_ps();
                    UNROLLED for (int v = 0; v < VECTORS; v++) {
                        const __m512 keys =
                            kept(job->memory, key + v * LANE_COUNT, masks[v], memory_is);
                        UNROLLED for (int h = 0; h < HEADS; h++)
                            products[h][i] = _mm512_fmadd_ps(keys, queries[h][v], products[h][i]);
                    }
                }
                UNROLLED for (int h = 0; h < HEADS; h++) quarters[h][quad] = quarter_sums(products[h]);
            }
            const __mmask16 seen = lanes_left(tokens - group);
            UNROLLED for (int h = 0; h < HEADS; h++) {
                const __m512 found = _mm512_mul_ps(
                    quarters_added(quarters_added(quarters[h][0], quarters[h][1]),
                                   quarters_added(quarters[h][2], quarters[h][3])),
                    _mm512_set1_ps(scale));
                tile_largest[h] = _mm512_mask_max_ps(tile_largest[h], seen, tile_largest[h], found);
                _mm512_store_ps(scores[h] + group, found);
            }
        }
        UNROLLED for (int h = 0; h < HEADS; h++) {
            const float before = largest[h], found = _mm512_reduce_max_ps(tile_largest[h]);
            if (found > before) {
                largest[h] = found;
                const __m512 shrunk =
                    exponential(_mm512_set1_ps(before == -__builtin_inff() ? -104.0f
                                                                           : before - found));
                UNROLLED for (int v = 0; v < VECTORS; v++) sums[h][v] = _mm512_mul_ps(sums[h][v], shrunk);
                weights[h] *= _mm512_cvtss_f32(shrunk);
            }
            __m512 total = _mm512_setzero_ps();
            for (int64_t group = 0; group < tokens; group += LANE_COUNT) {
                const __m512 weight = _mm512_maskz_mov_ps(
                    lanes_left(tokens - group),
                    exponential(_mm512_sub_ps(_mm512_load_ps(scores[h] + group),
                                              _mm512_set1_ps(largest[h]))));
                _mm512_store_ps(scores[h] + group, weight);
                total = _mm512_add_ps(total, weight);
            }
            weights[h] += _mm512_reduce_add_ps(total);
        }
        for (int64_t token = 0; token < tokens; token++) {
            UNROLLED for (int line = 0; line < VECTORS * LANE_COUNT * SCALAR_BYTES; line += 64)
                __builtin_prefetch(next_values + token * dim * SCALAR_BYTES + line, 0, 2);
            UNROLLED for (int v = 0; v < VECTORS; v++) {
                const __m512 values = kept(job->memory, value_at + token * dim + v * LANE_COUNT,
                                           masks[v], memory_is);
                UNROLLED for (int h = 0; h < HEADS; h++)
                    sums[h][v] =
                        _mm512_fmadd_ps(values, _mm512_set1_ps(scores[h][token]), sums[h][v]);
            }
        }
        at += tokens;
    }
    const int64_t out_at = ((work * job->kv_heads + kv_head) * shared + first) * dim;
    UNROLLED for (int h = 0; h < HEADS; h++) {
        const __m512 whole = _mm512_set1_ps(memory_is == IS_FP8 ? weights[h] / FP8_SCALE : weights[h]);
        UNROLLED for (int v = 0; v < VECTORS; v++)
            stored(job->out, out_at + h * dim + v * LANE_COUNT, masks[v],
                   _mm512_div_ps(sums[h][v], whole));
    }
}

#define ATTEND_OF(HEADS, VECTORS, KIND)                                                          \
    static void attend_##HEADS##_##VECTORS##_##KIND(const attend_job *job, int64_t work,         \
                                                    int64_t kv_head, int64_t first) {            \
        attend_heads(job, work, kv_head, first, HEADS, VECTORS, KIND);                           \
    }
#define ATTEND_FOR(VECTORS, KIND)                                                                \
    ATTEND_OF(1, VECTORS, KIND) ATTEND_OF(2, VECTORS, KIND)                                      \
    ATTEND_OF(3, VECTORS, KIND) ATTEND_OF(4, VECTORS, KIND)
#define ATTENDS_FOR(VECTORS, KIND)                                                               \
    {attend_1_##VECTORS##_##KIND, attend_2_##VECTORS##_##KIND, attend_3_##VECTORS##_##KIND,      \
     attend_4_##VECTORS##_##KIND}
#define ATTEND_ALL(KIND) ATTEND_FOR(1, KIND) ATTEND_FOR(2, KIND) ATTEND_FOR(4, KIND) ATTEND_FOR(8, KIND)
#define ATTENDS_ALL(KIND)                                                                        \
    {ATTENDS_FOR(1, KIND), ATTENDS_FOR(2, KIND), ATTENDS_FOR(4, KIND), ATTENDS_FOR(8, KIND)}
ATTEND_ALL(IS_FLOAT32) ATTEND_ALL(IS_BF16) ATTEND_ALL(IS_FP8)
typedef void (*attend_function)(const attend_job *, int64_t, int64_t, int64_t);
static const attend_function ATTEND[3][4][SHARED_MAX] = {
    ATTENDS_ALL(IS_FLOAT32), ATTENDS_ALL(IS_BF16), ATTENDS_ALL(IS_FP8)};

/* grouped_attention.py: the query token of each sequence over its pages; head_dim is at most 128. The
 * sequences with the longest contexts are last in the batch, and are started first. */
void attend_last_tokens(void *data) {
    attend_job *job = data;
    const int64_t items = job->works * job->kv_heads;
    const int size = job->head_dim <= 16 ? 0 : job->head_dim <= 32 ? 1 : job->head_dim <= 64 ? 2 : 3;
    for (;;) {
        const int64_t item = items - 1 - taken(&job->next, 1);
        if (item < 0) return;
        for (int64_t first = 0; first < job->shared;) {
            int64_t heads = job->shared - first;
            if (heads > SHARED_MAX) heads = SHARED_MAX;
            ATTEND[job->memory_is][size][heads - 1](job, item / job->kv_heads,
                                                    item % job->kv_heads, first);
            first += heads;
        }
    }
}
#endif

/* ---- index replica: block keys looked up in a table that another process may be writing */

#define KEY_WORDS 2
#define ENTRY_WORDS 8
#define ENTRY_WAYS 7
#define BUCKET_WORDS ((ENTRY_WAYS + 1) * ENTRY_WORDS)
#define COPIES_MAX 2
#define KEYS_AT_ONCE 32

static inline uint64_t key_hash(const uint64_t *key) {
    uint64_t mixed = (key[0] + key[1] * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
    mixed ^= mixed >> 32;
    mixed *= 0x9E3779B97F4A7C15u;
    return mixed ^ mixed >> 29;
}

/* The valid entries of one block key, in the order of its buckets; at most `most`. `found` may be null.
 * Each entry is copied before it is checked, because its writer does not wait. */
static uint64_t entries_of(const uint64_t *const *buckets, uint64_t tag, const uint64_t *key,
                           uint64_t most, uint64_t *found) {
    uint64_t count = 0, entry[ENTRY_WORDS];
    for (int which = 0; which < 2; which++) {
        const volatile uint64_t *tags = buckets[which];
        for (int way = 0; way < ENTRY_WAYS; way++) {
            if (tags[way] != tag) continue;
            const volatile uint64_t *there = tags + (way + 1) * ENTRY_WORDS;
            for (int word = 0; word < ENTRY_WORDS; word++) entry[word] = there[word];
            if (entry[0] != key[0] || entry[1] != key[1]) continue;
            if (hash_fields((const uint8_t *)entry) != entry[ENTRY_WORDS - 1]) continue;
            if (found) memcpy(found + count * ENTRY_WORDS, entry, sizeof entry);
            if (++count == most) return count;
        }
    }
    return count;
}

/* Looks up several block keys together, so that their memory accesses overlap. */
static void look_up(const uint64_t *table, uint64_t mask, const uint8_t *keys, uint64_t count,
                    uint8_t *exists, uint64_t *found) {
    const uint64_t *buckets[KEYS_AT_ONCE][2];
    uint64_t tags[KEYS_AT_ONCE], key[KEYS_AT_ONCE][KEY_WORDS];
    for (uint64_t start = 0; start < count; start += KEYS_AT_ONCE) {
        const uint64_t left = count - start, many = left < KEYS_AT_ONCE ? left : KEYS_AT_ONCE;
        memcpy(key, keys + start * sizeof key[0], many * sizeof key[0]);
        for (uint64_t at = 0; at < many; at++) {
            const uint64_t hash = key_hash(key[at]);
            const uint64_t first = hash & mask, second = (hash >> 32) & mask;
            buckets[at][0] = table + first * BUCKET_WORDS;
            buckets[at][1] = table + (second ^ (first == second)) * BUCKET_WORDS;
            __builtin_prefetch(buckets[at][0]);
            __builtin_prefetch(buckets[at][1]);
            tags[at] = hash | 1;
        }
        for (uint64_t at = 0; at < many; at++)
            for (int which = 0; which < 2; which++)
                for (int way = 0; way < ENTRY_WAYS; way++)
                    if (buckets[at][which][way] == tags[at])
                        __builtin_prefetch(buckets[at][which] + (way + 1) * ENTRY_WORDS);
        for (uint64_t at = 0; at < many; at++) {
            uint64_t *into = found ? found + (start + at) * COPIES_MAX * ENTRY_WORDS : 0;
            const uint64_t most = found ? COPIES_MAX : 1;
            const uint64_t copies = entries_of(buckets[at], tags[at], key[at], most, into);
            if (exists) exists[start + at] = copies > 0;
        }
    }
}

/* index_table.py: which of these block keys have an entry; a byte for each. */
void index_exist(const uint64_t *table, uint64_t mask, const uint8_t *keys, uint64_t count,
                 uint8_t *exists) {
    look_up(table, mask, keys, count, exists, 0);
}

/* index_table.py: COPIES_MAX entries for each of these block keys, zeros where there are none. */
void index_find(const uint64_t *table, uint64_t mask, const uint8_t *keys, uint64_t count,
                uint64_t *found) {
    look_up(table, mask, keys, count, 0, found);
}
/* ---- slot headers: the fields of slot_memory.py, and xxh3-64 of their 56 bytes */

typedef struct {
    uint32_t magic, state;
    uint64_t generation;
    uint8_t key[16];
    uint64_t checksum, length_bytes;
    uint32_t ephemeral, layers;
    uint64_t own;
} slot_header_t;

_Static_assert(sizeof(slot_header_t) == 64 && offsetof(slot_header_t, own) == FIELDS_BYTES,
               "a header");

/* Writes `count` headers, each at `to` + its offset, followed by zeros. They differ in these columns. */
void slot_headers(uint64_t count, uint8_t *to, const uint64_t *offsets, const uint64_t *generations,
                  const uint8_t *keys, const uint64_t *checksums, const slot_header_t *alike,
                  uint64_t zero_bytes) {
    slot_header_t header = *alike;
    const uint8_t *raw = (const uint8_t *)&header;
    for (uint64_t at = 0; at < count; at++) {
        header.generation = generations[at];
        memcpy(header.key, keys + 16 * at, 16);
        header.checksum = checksums[at];
        header.own = hash_fields(raw);
        memcpy(to + offsets[at], raw, sizeof header);
        memset(to + offsets[at] + sizeof header, 0, zero_bytes);
    }
}

/* ---- torch engine: products of float32 rows with bfloat16 matrices, summed in float32
 *
 * A matrix is packed: a 32-bit word has the bfloat16 of two consecutive inputs for one output. There
 * are two forms. The exact form multiplies float32 by widened bfloat16. The rounded form rounds the
 * rows to bfloat16, for CPUs that multiply pairs of bfloat16 faster (mixed_products.py chooses). In
 * the exact form each sum is in the order of the inputs, so a row's result does not depend on other
 * rows. */

typedef void (*brgemm_function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, _Bool,
                                const void *, const void *, float *, _Bool);
typedef struct {
    int64_t next, rows, inputs, outputs, row_stride; /* row_stride: scalars of `from` */
    const float *from;
    const uint32_t *weight; /* [outputs / COLUMNS rounded up][inputs / 2][COLUMNS] */
    const float *bias;      /* [outputs], or null */
    float *out;             /* [rows, outputs] */
    int64_t is_added;       /* to `out` */
    uint16_t *rounded;      /* rounded form: scratch [rows, inputs] */
    void *brgemm, *release; /* rounded form: torch's product of a block, and what ends its use */
} product_job;

typedef struct {
    int64_t next, tokens, start, heads, kv_heads, head_dim, block_tokens, page_stride; /* scalars */
    const void *memory;      /* this layer's first K head of page 0 */
    const int64_t *pages;    /* of the sequence */
    const float *queries;    /* [tokens, heads, head_dim] */
    int64_t query_stride;    /* scalars from one token to the next */
    float *out;              /* [tokens, heads * head_dim] */
    void *packed_keys, *packed_values; /* [kv_heads, tiles, KEYS, head_dim] each, bfloat16 */
    int64_t memory_is, is_rounded;     /* is_rounded: products in the rounded form */
    float scale;
} prefill_job;

#if HAS_VECTORS
#define COLUMNS 64
#define STEP_ROWS 6       /* times COLUMNS are 24 sums in registers */
#define PANEL_ROWS 120    /* with PANEL_PAIRS, a panel of rows fits into the L2 cache */
#define PANEL_PAIRS 1024
#define ROUNDED_ROWS 8

/* out [ROWS][COLUMNS] = (or +=) rows times matrix [pairs][COLUMNS of `stride` words]. A row has float32
 * numbers, or in the rounded form words of two bfloat16. `masks`: the columns that `out` has. */
INLINE void multiplied(const int ROWS, const void *const *rows, int64_t pairs,
                       const uint32_t *matrix, int64_t stride, float *out, int64_t out_stride,
                       const __mmask16 *masks, const int is_added, const int is_rounded) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    __m512 sums[STEP_ROWS][4];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < 4; v++)
            sums[r][v] = is_added ? loaded(out + r * out_stride, v * LANE_COUNT, masks[v])
                                  : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512i words[4];
        UNROLLED for (int v = 0; v < 4; v++)
            words[v] = _mm512_loadu_si512(matrix + pair * stride + v * LANE_COUNT);
#if HAS_PRODUCTS
        if (is_rounded) {
            UNROLLED for (int r = 0; r < ROWS; r++) {
                const __m512bh both =
                    (__m512bh)_mm512_set1_epi32((int)((const uint32_t *)rows[r])[pair]);
                UNROLLED for (int v = 0; v < 4; v++)
                    sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, (__m512bh)words[v]);
            }
            continue;
        }
#endif
        __m512 columns[4];
        UNROLLED for (int v = 0; v < 4; v++)
            columns[v] = _mm512_castsi512_ps(_mm512_slli_epi32(words[v], 16));
        UNROLLED for (int r = 0; r < ROWS; r++) {
            const __m512 input = _mm512_set1_ps(((const float *)rows[r])[2 * pair]);
            UNROLLED for (int v = 0; v < 4; v++)
                sums[r][v] = _mm512_fmadd_ps(input, columns[v], sums[r][v]);
        }
        UNROLLED for (int v = 0; v < 4; v++)
            columns[v] = _mm512_castsi512_ps(_mm512_and_si512(words[v], upper));
        UNROLLED for (int r = 0; r < ROWS; r++) {
            const __m512 input = _mm512_set1_ps(((const float *)rows[r])[2 * pair + 1]);
            UNROLLED for (int v = 0; v < 4; v++)
                sums[r][v] = _mm512_fmadd_ps(input, columns[v], sums[r][v]);
        }
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int v = 0; v < 4; v++)
            stored(out + r * out_stride, v * LANE_COUNT, masks[v], sums[r][v]);
}

typedef void (*multiply_function)(const void *const *, int64_t, const uint32_t *, float *, int64_t,
                                  const __mmask16 *);
#define MULTIPLY_OF(ROWS)                                                                        \
    static void multiply_##ROWS(const void *const *rows, int64_t pairs, const uint32_t *matrix,  \
                                float *out, int64_t out_stride, const __mmask16 *masks) {        \
        multiplied(ROWS, rows, pairs, matrix, COLUMNS, out, out_stride, masks, 1, 0);            \
    }
MULTIPLY_OF(1) MULTIPLY_OF(2) MULTIPLY_OF(3) MULTIPLY_OF(4) MULTIPLY_OF(5) MULTIPLY_OF(6)
static const multiply_function MULTIPLY[STEP_ROWS + 1] = {
    0, multiply_1, multiply_2, multiply_3, multiply_4, multiply_5, multiply_6};

/* Packs a matrix [outputs][inputs] of bfloat16; zeros after the last output. */
void pack_matrix(const uint32_t *from, int64_t outputs, int64_t inputs, uint32_t *to) {
    const int64_t pairs = inputs / 2;
    for (int64_t block = 0; block * COLUMNS < outputs; block++)
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t column = 0; column < COLUMNS; column++) {
                const int64_t output = block * COLUMNS + column;
                *to++ = output < outputs ? from[output * pairs + pair] : 0;
            }
}

/* Rounds a job's rows to bfloat16, before `multiply_rows` in the rounded form. */
void round_rows(void *data) {
    product_job *job = data;
    for (;;) {
        const int64_t first = taken(&job->next, ROUNDED_ROWS);
        if (first >= job->rows) return;
        for (int64_t row = first; row < job->rows && row < first + ROUNDED_ROWS; row++)
            keep(job->rounded, row * job->inputs, job->from + row * job->row_stride, job->inputs,
                 IS_BF16);
    }
}

/* One block of COLUMNS outputs of `rows` rows, of which the first is `first`. */
static void multiply_block(const product_job *job, int64_t block, int64_t first, int64_t rows) {
    const int64_t at = block * COLUMNS, columns = job->outputs - at, pairs = job->inputs / 2;
    const uint32_t *weight = job->weight + block * pairs * COLUMNS;
    float *out = job->out + first * job->outputs + at;
    __mmask16 masks[4];
    for (int v = 0; v < 4; v++) masks[v] = lanes_left(columns - v * LANE_COUNT);
    if (!job->is_added)
        for (int64_t row = 0; row < rows; row++)
            for (int v = 0; v < 4; v++)
                stored(out + row * job->outputs, v * LANE_COUNT, masks[v],
                       job->bias ? loaded(job->bias + at, v * LANE_COUNT, masks[v])
                                 : _mm512_setzero_ps());
    if (job->rounded && columns >= COLUMNS) {
        ((brgemm_function)job->brgemm)(rows, COLUMNS, job->inputs, job->inputs, COLUMNS,
                                       job->outputs, 1, job->rounded + first * job->inputs, weight,
                                       out, 1);
        return;
    }
    for (int64_t pair = 0; pair < pairs; pair += PANEL_PAIRS) {
        const int64_t some = pairs - pair < PANEL_PAIRS ? pairs - pair : PANEL_PAIRS;
        for (int64_t row = 0; row < rows; row += STEP_ROWS) {
            const int64_t step = rows - row < STEP_ROWS ? rows - row : STEP_ROWS;
            const void *inputs[STEP_ROWS];
            for (int64_t r = 0; r < step; r++)
                inputs[r] = job->from + (first + row + r) * job->row_stride + 2 * pair;
            MULTIPLY[step](inputs, some, weight + pair * COLUMNS, out + row * job->outputs,
                           job->outputs, masks);
        }
    }
}

/* mixed_products.py: rows times a packed matrix. */
void multiply_rows(void *data) {
    product_job *job = data;
    const int64_t blocks = (job->outputs + COLUMNS - 1) / COLUMNS;
    const int64_t panels = (job->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    for (;;) {
        const int64_t item = taken(&job->next, 1);
        if (item >= blocks * panels) break;
        const int64_t first = item / blocks * PANEL_ROWS, left = job->rows - first;
        multiply_block(job, item % blocks, first, left < PANEL_ROWS ? left : PANEL_ROWS);
    }
    if (job->release) ((void (*)(_Bool))job->release)(1);
}

/* ---- torch engine: attention of a prompt's chunk over paged KV in bfloat16 or fp8
 *
 * K and V are packed once per chunk as matrices for `multiplied`: K in tiles of KEYS tokens
 * [head_dim / 2][KEYS], V in pairs of tokens [KEYS / 2][head_dim]. */

#define KEYS COLUMNS
#define ROWS_MAX 96 /* of a tile: query tokens times heads that share a KV head */

INLINE int64_t key_tiles(const prefill_job *job) {
    return (job->start + job->tokens + KEYS - 1) / KEYS;
}

/* A row of the pages as bfloat16, which represents every fp8 exactly. */
INLINE void fp8_row(const void *memory, int64_t at, int64_t dim, uint16_t *row) {
    for (int64_t i = 0; i < dim; i += LANE_COUNT)
        _mm256_storeu_si256((__m256i *)(row + i),
                            narrowed(_mm512_mul_ps(kept(memory, at + i, 0xFFFF, IS_FP8),
                                                   _mm512_set1_ps(FP8_SCALE))));
}

/* Packs K and V of every tile of the context; zeros after its end. */
void pack_prefill(void *data) {
    prefill_job *job = data;
    const int64_t dim = job->head_dim, block = job->block_tokens, tiles = key_tiles(job);
    const int64_t end = job->start + job->tokens;
    for (;;) {
        const int64_t item = taken(&job->next, 1);
        if (item >= tiles * job->kv_heads) return;
        const int64_t head = item / tiles, first = item % tiles * KEYS;
        uint32_t *keys = (uint32_t *)job->packed_keys + item * KEYS * dim / 2;
        uint16_t *values = (uint16_t *)job->packed_values + item * KEYS * dim;
        for (int64_t token = 0; token < KEYS; token++) {
            const int64_t at = first + token;
            if (at >= end) {
                for (int64_t i = 0; i < dim / 2; i++) keys[i * KEYS + token] = 0;
                for (int64_t i = 0; i < dim; i++) values[token / 2 * 2 * dim + 2 * i + token % 2] = 0;
                continue;
            }
            const int64_t key_at =
                job->pages[at / block] * job->page_stride + (head * block + at % block) * dim;
            const int64_t value_at = key_at + job->kv_heads * block * dim;
            const uint16_t *key = (const uint16_t *)job->memory + key_at;
            const uint16_t *value = (const uint16_t *)job->memory + value_at;
            uint16_t both[2][2 * KEYS]; /* head_dim is at most 2 * KEYS */
            if (job->memory_is == IS_FP8) {
                fp8_row(job->memory, key_at, dim, both[0]);
                fp8_row(job->memory, value_at, dim, both[1]);
                key = both[0];
                value = both[1];
            }
            for (int64_t i = 0; i < dim / 2; i++) {
                uint32_t pair;
                memcpy(&pair, key + 2 * i, sizeof pair);
                keys[i * KEYS + token] = pair;
            }
            uint16_t *to = values + token / 2 * 2 * dim + token % 2;
            for (int64_t i = 0; i < dim; i++) to[2 * i] = value[i];
        }
    }
}

/* Online softmax of a row over one more tile: replaces its scores by weights, in the rounded form by
 * weights in bfloat16; rescales the sums so far. */
INLINE void weighed(float *scores, int64_t seen, float scale, float *largest, float *weight,
                    float *sums, int64_t dim, const int is_rounded) {
    __m512 found[4], most = _mm512_set1_ps(-__builtin_inff()), total = _mm512_setzero_ps();
    __mmask16 masks[4];
    UNROLLED for (int v = 0; v < 4; v++) {
        masks[v] = lanes_left(seen - v * LANE_COUNT);
        found[v] = _mm512_mul_ps(_mm512_loadu_ps(scores + v * LANE_COUNT), _mm512_set1_ps(scale));
        most = _mm512_mask_max_ps(most, masks[v], most, found[v]);
    }
    const float now = _mm512_reduce_max_ps(most);
    if (now > *largest) {
        if (*weight > 0) {
            const __m512 shrunk = exponential(_mm512_set1_ps(*largest - now));
            for (int64_t i = 0; i < dim; i += LANE_COUNT)
                _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), shrunk));
            *weight *= _mm512_cvtss_f32(shrunk);
        }
        *largest = now;
    }
    UNROLLED for (int v = 0; v < 4; v++) {
        const __m512 part = _mm512_maskz_mov_ps(
            masks[v], exponential(_mm512_sub_ps(found[v], _mm512_set1_ps(*largest))));
        total = _mm512_add_ps(total, part);
        if (is_rounded)
            _mm256_storeu_si256((__m256i *)scores + v, narrowed(part));
        else
            _mm512_storeu_ps(scores + v * LANE_COUNT, part);
    }
    *weight += _mm512_reduce_add_ps(total);
}

INLINE void attend_tile(const prefill_job *job, int64_t kv_head, int64_t first, int64_t tokens,
                        const int is_rounded) {
    const int64_t dim = job->head_dim, shared = job->heads / job->kv_heads;
    const int64_t rows = tokens * shared, tiles = key_tiles(job);
    const __mmask16 all[4] = {0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF};
    float scores[ROWS_MAX][KEYS], sums[ROWS_MAX][2 * KEYS], largest[ROWS_MAX], total[ROWS_MAX];
    uint16_t rounded[ROWS_MAX][2 * KEYS];
    const void *queries[ROWS_MAX], *weights[ROWS_MAX];
    for (int64_t row = 0; row < ROWS_MAX; row++) {
        const int64_t real = row < rows ? row : rows - 1;
        const float *query = job->queries + (first + real / shared) * job->query_stride +
                             (kv_head * shared + real % shared) * dim;
        if (is_rounded) keep(rounded[row], 0, query, dim, IS_BF16);
        queries[row] = is_rounded ? (const void *)rounded[row] : query;
        weights[row] = scores[row];
        largest[row] = -__builtin_inff();
        total[row] = 0;
    }
    memset(sums, 0, sizeof sums);
    const int64_t last = (job->start + first + tokens - 1) / KEYS;
    for (int64_t tile = 0; tile <= last; tile++) {
        const int64_t item = kv_head * tiles + tile;
        const uint32_t *keys = (const uint32_t *)job->packed_keys + item * KEYS * dim / 2;
        const uint32_t *values = (const uint32_t *)job->packed_values + item * KEYS * dim / 2;
        for (int64_t row = 0; row < rows; row += STEP_ROWS)
            multiplied(STEP_ROWS, queries + row, dim / 2, keys, KEYS, scores[row], KEYS, all, 0,
                       is_rounded);
        for (int64_t row = 0; row < rows; row++)
            weighed(scores[row], job->start + first + row / shared + 1 - tile * KEYS, job->scale,
                    &largest[row], &total[row], sums[row], dim, is_rounded);
        for (int64_t row = 0; row < rows; row += STEP_ROWS)
            for (int64_t column = 0; column < dim; column += KEYS)
                multiplied(STEP_ROWS, weights + row, KEYS / 2, values + column, dim,
                           sums[row] + column, 2 * KEYS, all, 1, is_rounded);
    }
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = ((first + row / shared) * job->heads + kv_head * shared + row % shared) *
                           dim;
        for (int64_t i = 0; i < dim; i += LANE_COUNT)
            stored(job->out, at + i, 0xFFFF,
                   _mm512_div_ps(_mm512_loadu_ps(sums[row] + i), _mm512_set1_ps(total[row])));
    }
}

/* grouped_attention.py: causal attention of a sequence's tokens from `start` on; head_dim is 64 or 128,
 * and at most ROWS_MAX heads share a KV head. The longest tiles are started first. */
void attend_prefill(void *data) {
    prefill_job *job = data;
    const int64_t step = ROWS_MAX / (job->heads / job->kv_heads);
    const int64_t tiles = (job->tokens + step - 1) / step;
    for (;;) {
        const int64_t item = tiles * job->kv_heads - 1 - taken(&job->next, 1);
        if (item < 0) return;
        const int64_t first = item / job->kv_heads * step, left = job->tokens - first;
        const int64_t kv_head = item % job->kv_heads, tokens = left < step ? left : step;
        if (HAS_PRODUCTS && job->is_rounded)
            attend_tile(job, kv_head, first, tokens, 1);
        else
            attend_tile(job, kv_head, first, tokens, 0);
    }
}
#endif
