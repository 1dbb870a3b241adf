/* A session: the arena, the threads, and the walks over the tables that barellm made of each program. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime.h"

#ifdef __aarch64__
#include <sys/auxv.h>
#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)
#endif
#endif

#define HUGE_PAGE ((int64_t)2 << 20)

/* The machine code of sync.py: a walk over a table by all threads. */
extern void worker(void *thread, void *shared);
extern void lead(void *thread, void *shared);
extern void stop(void *shared);

static _Thread_local char message[512];

int fail(const char *form, ...) {
    va_list list;
    va_start(list, form);
    vsnprintf(message, sizeof message, form, list);
    va_end(list);
    return -1;
}

const char *barellm_error(void) { return message; }

/* --- opening --- */

/* Whether the processor lacks what the code needs. */
static int lacks_instructions(void) {
    if (!*instructions) return 0;
#ifdef __aarch64__
    if (getauxval(AT_HWCAP2) & HWCAP2_BF16) return 0; /* nothing else is asked for on aarch64 */
    return fail("this program was built for a processor with %s, which this one lacks: build it again", instructions);
#else
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[8192], wanted[256], *rest = wanted, *name;
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) found = !strncmp(line, "flags", 5);
    if (file) fclose(file);
    if (!found) return 0; /* nobody says */
    line[strcspn(line, "\n")] = ' ';
    snprintf(wanted, sizeof wanted, "%s", instructions);
    while ((name = strtok_r(rest, " ", &rest))) {
        char word[64];
        snprintf(word, sizeof word, " %s ", name);
        if (!strstr(line, word)) return fail("this program was built for a processor with %s, which this one lacks: build it again here", name);
    }
#ifdef __x86_64__
    /* Tile registers are given to a process that asks for them (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
    if (strstr(instructions, "amx_tile") && syscall(SYS_arch_prctl, 0x1023, 18)) return fail("Linux does not let this process use AMX tiles");
#endif
    return 0;
#endif
}

static int64_t *place(char *block, int offset) { return (int64_t *)(block + offset); }

static void *work(void *own) {
    struct thread *t = own;
    worker(t->block, t->session->shared);
    return NULL;
}

/* One processor for each physical core, in order. */
static int processors(int *found, int most) {
    cpu_set_t set;
    int count = 0;
    if (sched_getaffinity(0, sizeof set, &set)) return 0;
    for (int cpu = 0; cpu < CPU_SETSIZE && count < most; cpu++) {
        if (!CPU_ISSET(cpu, &set)) continue;
        char path[128];
        int first = cpu;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        FILE *file = fopen(path, "r");
        if (file) {
            if (fscanf(file, "%d", &first) != 1) first = cpu;
            fclose(file);
        }
        if (first == cpu || !CPU_ISSET(first, &set)) found[count++] = cpu;
    }
    return count;
}

static int start_threads(struct barellm *s) {
    int cpus[1024], count = processors(cpus, 1024);
    const char *pin = getenv("BARELLM_PIN");
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 8 << 20);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the caller */
    int wrong = 0;
    for (int i = 1; i < s->threads && !wrong; i++) {
        wrong = pthread_create(&s->thread[i].handle, &attributes, work, &s->thread[i]);
        if (wrong) break;
        s->running = i;
        if (count && !(pin && !strcmp(pin, "0"))) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpus[i % count], &one);
            pthread_setaffinity_np(s->thread[i].handle, sizeof one, &one); /* where it is refused, it runs unpinned */
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return wrong ? fail("this machine starts no %d threads: %s", s->threads, strerror(wrong)) : 0;
}

/* Tables that kernels can walk: absolute addresses instead of offsets, and room for counters in each record. */
static int link_tables(struct barellm *s) {
    int64_t calls = 0;
    for (int p = 0; p < PROGRAMS; p++) calls += programs[p].count;
    s->arguments = malloc((argument_count + 1) * sizeof(int64_t));
    if (!s->arguments || posix_memalign((void **)&s->records, 64, (calls + 1) * RECORD_NBYTES)) return fail("no memory for the tables");
    memset(s->records, 0, (calls + 1) * RECORD_NBYTES);
    memcpy(s->arguments, arguments, argument_count * sizeof(int64_t));
    for (int64_t i = 0; i < relocation_count; i++) s->arguments[relocations[i]] += (int64_t)s->arena;
    char *record = s->records;
    for (int p = 0; p < PROGRAMS; p++) {
        s->table[p] = record;
        for (int64_t i = 0; i < programs[p].count; i++, record += RECORD_NBYTES) {
            const struct call *c = &programs[p].calls[i];
            *place(record, 0) = (int64_t)c->function;
            *place(record, 8) = (int64_t)(s->arguments + c->first);
            *place(record, BARRIER) = c->barrier;
        }
    }
    return 0;
}

static int map(struct barellm *s) {
    s->mapped_bytes = arena_bytes + HUGE_PAGE;
    s->mapped = mmap(NULL, s->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->mapped == MAP_FAILED) {
        s->mapped = NULL;
        return fail("no memory for an arena of %lld bytes", (long long)arena_bytes);
    }
    madvise(s->mapped, s->mapped_bytes, MADV_HUGEPAGE);
    s->arena = (char *)(((int64_t)s->mapped + HUGE_PAGE - 1) & -HUGE_PAGE);
    for (int64_t i = 0; i < constant_count; i++) memcpy(s->arena + constants[i].offset, constants[i].bytes, constants[i].nbytes);
    return 0;
}

static int prepare(struct barellm *s, int threads) {
    s->threads = threads;
    s->thread = calloc(threads, sizeof *s->thread);
    if (!s->thread || posix_memalign((void **)&s->shared, 64, SHARED_NBYTES + threads * RT_NBYTES) || map(s) || link_tables(s)) return -1;
    memset(s->shared, 0, SHARED_NBYTES + threads * RT_NBYTES);
    for (int i = 0; i < threads; i++) {
        char *block = s->shared + SHARED_NBYTES + i * RT_NBYTES;
        int64_t groups = threads < GROUPS ? threads : GROUPS;
        *place(block, RT_THREAD) = i;
        *place(block, RT_THREADS) = threads;
        *place(block, RT_SCALARS) = (int64_t)s->scalars;
        *place(block, RT_PRIVATE) = (int64_t)(s->arena + private_offset + i * private_bytes);
        *place(block, RT_GROUP) = i * groups / threads;
        *place(block, RT_GROUPS) = groups;
        s->thread[i] = (struct thread){.session = s, .block = block};
    }
    s->total = run.steps;
    return start_threads(s);
}

barellm *barellm_open(int threads) {
    int cpus[1024], count = processors(cpus, 1024);
    *message = 0; /* of an earlier failure */
    if (threads == 0) threads = count < 1 ? 1 : count > most_threads ? most_threads : count;
    if (threads < 1 || threads > most_threads) {
        fail("threads is %d, this program was built for 1 to %lld", threads, (long long)most_threads);
        return NULL;
    }
    if (lacks_instructions()) return NULL;
    struct barellm *s = calloc(1, sizeof *s);
    if (s && !prepare(s, threads)) return s;
    if (!*message) fail("no memory for a session");
    barellm_close(s);
    return NULL;
}

void barellm_close(barellm *s) {
    if (!s) return;
    if (s->shared) stop(s->shared);
    for (int i = 1; i <= s->running; i++) pthread_join(s->thread[i].handle, NULL);
    if (s->mapped) munmap(s->mapped, s->mapped_bytes);
    free(s->arguments);
    free(s->records);
    free(s->shared);
    free(s->thread);
    free(s);
}

/* --- a run of a program --- */

static void set(struct barellm *s, int row, int64_t value) { s->scalars[row] = value; }

static void set_number(struct barellm *s, int row, double value) { memcpy(&s->scalars[row], &value, sizeof value); }

static void begin(struct barellm *s) {
    for (int64_t i = 0; i < default_count; i++) s->scalars[defaults[i][0]] = defaults[i][1];
}

static void walk(struct barellm *s, int program) {
    if (!programs[program].count) return;
    *place(s->shared, TABLE) = (int64_t)s->table[program];
    *place(s->shared, TABLE + 8) = programs[program].count;
    *place(s->shared, TABLE + 16) = 0;
    lead(s->thread[0].block, s->shared);
}

static int check(const char *what, const int32_t *ids, int64_t count, int32_t least) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < least || ids[i] >= run.vocabulary)
            return fail("%s[%lld] is %d, expected an id from %d to %lld", what, (long long)i, ids[i], least, (long long)run.vocabulary - 1);
    return 0;
}

static int put(struct barellm *s, int program, const int32_t *tokens, const int32_t *targets, int64_t batch, int64_t seq) {
    const struct program *p = &programs[program];
    int64_t count = batch * seq;
    if (batch < 1 || batch > p->batch || seq < 1 || seq > p->seq)
        return fail("%lld x %lld tokens, planned for 1 to %lld x 1 to %lld", (long long)batch, (long long)seq, (long long)p->batch, (long long)p->seq);
    if (check("tokens", tokens, count, 0) || (targets && check("targets", targets, count, -1))) return -1;
    memcpy(s->arena + p->tokens, tokens, count * sizeof *tokens);
    if (targets) memcpy(s->arena + p->targets, targets, count * sizeof *targets);
    set(s, SCALAR_BATCH, batch);
    set(s, SCALAR_SEQ, seq);
    return 0;
}

static float output(struct barellm *s, int program) { return *(float *)(s->arena + programs[program].output); }

/* --- the course of a run: every number is a function of the step --- */

static int64_t rising(int64_t before) {
    int64_t most = run.ramp_tokens ? run.ramp_from + (run.accumulate - run.ramp_from) * before * run.batch * run.seq / run.ramp_tokens : run.accumulate;
    return most < run.accumulate ? most : run.accumulate;
}

int64_t micro_batches_before(int64_t step) {
    int64_t before = 0, i = 0;
    for (; i < step && rising(before) < run.accumulate; i++) before += rising(before);
    return before + (step - i) * run.accumulate;
}

double learning_rate(int64_t step, int64_t total) {
    double low = schedule.min_lr, high = schedule.lr;
    if (step < schedule.warmup) return high * (double)(step + 1) / (double)(schedule.warmup + 1);
    if (schedule.kind == CONSTANT) return high;
    int64_t falling = total - 1 - schedule.warmup;
    if (schedule.kind == WSD) {
        int64_t last = (int64_t)nearbyint(schedule.cooldown * (double)total);
        if (last < falling) falling = last;
    }
    int64_t done = step - (total - 1 - falling);
    double progress = (double)(done > 0 ? done : 0) / (double)(falling > 1 ? falling : 1);
    if (progress > 1) progress = 1;
    if (schedule.kind == COSINE) return low + 0.5 * (1.0 + cos(3.141592653589793 * progress)) * (high - low);
    return high - progress * (high - low);
}

static double momentum(int64_t step, int64_t total) {
    double low = schedule.momentum_start, high = schedule.momentum;
    if (step < schedule.momentum_warmup) return low + (double)step / (double)schedule.momentum_warmup * (high - low);
    int64_t falling = step - (total - schedule.momentum_cooldown);
    if (falling < 0) falling = 0;
    return high - (double)falling / (double)(schedule.momentum_cooldown > 1 ? schedule.momentum_cooldown : 1) * (high - low);
}

barellm_info barellm_about(const barellm *s) {
    int64_t before = micro_batches_before(s->step), parameters = 0;
    for (int64_t i = 0; i < tensor_count; i++)
        if (tensors[i].role == 'p') parameters += tensors[i].size;
    return (barellm_info){
        .batch = run.batch, .seq = run.seq, .vocabulary = run.vocabulary, .steps = s->total, .step = s->step,
        .micro_batches = micro_batches_before(s->step + 1) - before, .samples = before * run.batch,
        .arena_bytes = arena_bytes, .parameters = parameters,
    };
}

int barellm_initialize(barellm *s) {
    begin(s);
    set(s, SCALAR_SEED, run.seed);
    walk(s, PROGRAM_INIT);
    return 0;
}

int barellm_step(barellm *s, const int32_t *tokens, const int32_t *targets, barellm_result *result) {
    int64_t first = micro_batches_before(s->step), count = micro_batches_before(s->step + 1) - first, size = run.batch * run.seq;
    double inv_targets = 1.0 / (double)(run.batch * count * run.seq);
    double larger = (run.loss_gradient ? run.loss_gradient : inv_targets) / inv_targets, shown = 1.0 / larger, loss = 0;
    if (check("tokens", tokens, count * size, 0) || check("targets", targets, count * size, -1)) return -1;
    for (int64_t micro = 0; micro < count; micro++) {
        begin(s);
        if (put(s, PROGRAM_FORWARD_BACKWARD, tokens + micro * size, targets + micro * size, run.batch, run.seq)) return -1;
        set(s, SCALAR_SEED, run.seed);
        set(s, SCALAR_STEP, s->step + 1);
        set(s, SCALAR_SAMPLE, (first + micro) * run.batch);
        set(s, SCALAR_ACCUMULATE, micro > 0);
        set_number(s, SCALAR_INV_TARGETS, inv_targets * larger);
        walk(s, PROGRAM_FORWARD_BACKWARD);
        loss += (double)output(s, PROGRAM_FORWARD_BACKWARD) * shown;
    }
    double rate = learning_rate(s->step, s->total), lr = rate * schedule.adamw, muon_lr = rate * schedule.muon;
    begin(s);
    set(s, SCALAR_STEP, s->step + 1);
    set(s, SCALAR_SEED, run.seed);
    set_number(s, SCALAR_LR, lr);
    set_number(s, SCALAR_MUON_LR, muon_lr);
    set_number(s, SCALAR_MOMENTUM, momentum(s->step, s->total));
    walk(s, PROGRAM_OPTIMIZER_STEP);
    s->step++;
    barellm_result found = {loss, output(s, PROGRAM_OPTIMIZER_STEP), lr, schedule.muon < 0 ? -1 : muon_lr};
    s->not_finite = isfinite(found.loss) && isfinite(found.norm) ? 0 : s->not_finite + 1;
    if (result) *result = found;
    return 0;
}

int barellm_evaluate(barellm *s, const int32_t *tokens, const int32_t *targets, int64_t batch, int64_t seq, double *loss) {
    int64_t valid = 0;
    begin(s);
    if (put(s, PROGRAM_EVAL, tokens, targets, batch, seq)) return -1;
    for (int64_t i = 0; i < batch * seq; i++) valid += targets[i] >= 0;
    if (!valid) return fail("all targets are -1, expected at least one that counts");
    set_number(s, SCALAR_INV_TARGETS, 1.0 / (double)valid);
    walk(s, PROGRAM_EVAL);
    *loss = output(s, PROGRAM_EVAL);
    return 0;
}

int64_t barellm_positions(void) { return programs[PROGRAM_DECODE].seq; }

int barellm_logits(barellm *s, const int32_t *tokens, int64_t count, int64_t position, float *logits) {
    begin(s);
    if (position < 0 || position + count > programs[PROGRAM_DECODE].seq)
        return fail("positions %lld to %lld, the model has %lld", (long long)position, (long long)(position + count), (long long)programs[PROGRAM_DECODE].seq);
    if (put(s, PROGRAM_DECODE, tokens, NULL, 1, count)) return -1;
    set(s, SCALAR_POS, position);
    walk(s, PROGRAM_DECODE);
    memcpy(logits, s->arena + programs[PROGRAM_DECODE].output, run.vocabulary * sizeof *logits);
    return 0;
}
