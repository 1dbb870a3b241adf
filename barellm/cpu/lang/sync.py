"""The native code of the thread pool: the barrier, the loops over a step's table, and how workers wait.

The block that all threads share (offsets in bytes, one cache line each, since different threads write them):

    0 arrived (i32)   64 generation of the barrier (i32)   128 sleepers (i32)   192 generation of jobs (i32)
    256 table (ptr), entries (i64), stamps (ptr)   320 stop (i32)   384 mutex   512 condition variable

A wait spins for about 2000 pauses and then sleeps: in the kernel's futex on Linux, on a condition variable elsewhere. Spinning
alone loses a whole time slice when two threads share a core; sleeping at once costs microseconds when they do not.

If `stamps` is not null, a run is traced: each thread writes the processor's steady counter to stamps[thread][entry], three i64:
before the call, after it, and after the barrier, if one follows."""

SHARED_NBYTES = 1024
ARRIVED, GENERATION, SLEEPERS, JOB, TABLE, STOP, MUTEX, CONDITION = 0, 64, 128, 192, 256, 320, 384, 512
RECORD_NBYTES = 64  # function, args, barrier after; from COUNTERS on an i32 counter of items taken for each group of threads
BARRIER, COUNTERS, GROUPS = 16, 32, 8
STAMPS = 3  # of a thread for each entry of a traced walk
SPINS = 2000

_PAUSE = {
    "x86": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "arm": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}
# Fenced: else the processor reads its counter ahead of the loads before, which may be a barrier that still holds.
_COUNTER = {
    "x86": """
declare void @llvm.x86.sse2.lfence()
declare i64 @llvm.readcyclecounter()

define i64 @now() {
  call void @llvm.x86.sse2.lfence()
  %now = call i64 @llvm.readcyclecounter()
  ret i64 %now
}""",
    "arm": """
declare void @llvm.aarch64.isb(i32)
declare i64 @llvm.read_volatile_register.i64(metadata)
!0 = !{!"cntvct_el0"}

define i64 @now() {
  call void @llvm.aarch64.isb(i32 15)
  %now = call i64 @llvm.read_volatile_register.i64(metadata !0)
  ret i64 %now
}""",
}
_FUTEX = {"x86": 202, "arm": 98}

_SLEEP_FUTEX = """
  %r = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i64 128, i32 %old, ptr null, ptr null, i64 0)"""
_WAKE_FUTEX = """
  %r = call i64 (i64, ...) @syscall(i64 {number}, ptr %word, i64 129, i64 2147483647, ptr null, ptr null, i64 0)"""
_SLEEP_CONDITION = """
  %m = getelementptr i8, ptr %s, i64 384
  %c = getelementptr i8, ptr %s, i64 512
  %l = call i32 @pthread_mutex_lock(ptr %m)
  %n = load atomic i32, ptr %word seq_cst, align 4
  %still = icmp eq i32 %n, %old
  br i1 %still, label %rest, label %leave
rest:
  %w = call i32 @pthread_cond_wait(ptr %c, ptr %m)
  br label %leave
leave:
  %u = call i32 @pthread_mutex_unlock(ptr %m)"""
_WAKE_CONDITION = """
  %m = getelementptr i8, ptr %s, i64 384
  %c = getelementptr i8, ptr %s, i64 512
  %l = call i32 @pthread_mutex_lock(ptr %m)
  %u = call i32 @pthread_mutex_unlock(ptr %m)
  %b = call i32 @pthread_cond_broadcast(ptr %c)"""


def _over_table(name: str, body: str, *, entry: str = "", leave: str = "") -> str:
    """LLVM IR of the function `name` that runs `body` for each record %rec of the table, number %i of %entries. The body's last
    block is %next; `entry` and `leave`: code before the first record and after the last."""
    return f"""
define internal void @{name}(ptr %rt, ptr %s) {{
entry:
  %tp = getelementptr i8, ptr %s, i64 {TABLE}
  %table = load ptr, ptr %tp, align 8
  %ep = getelementptr i8, ptr %s, i64 {TABLE + 8}
  %entries = load i64, ptr %ep, align 8{entry}
  br label %head
head:
  %i = phi i64 [0, %entry], [%i1, %next]
  %more = icmp ult i64 %i, %entries
  br i1 %more, label %body, label %done
body:
  %at = mul i64 %i, {RECORD_NBYTES}
  %rec = getelementptr i8, ptr %table, i64 %at{body}
  %i1 = add i64 %i, 1
  br label %head
done:{leave}
  ret void
}}
"""


def _walk(name: str, *, traced: bool) -> str:
    """LLVM IR of the function `name`, every thread's pass over the table: call each record's kernel and, if the record says so,
    wait for the other threads at the barrier. A traced one stores the time before the kernel, after it and after the barrier, and
    ends with one more barrier: after that all stamps are written."""
    meet = """
  %np = getelementptr i8, ptr %rt, i64 8
  %n64 = load i64, ptr %np, align 8
  %n = trunc i64 %n64 to i32
  call void @barrier(ptr %s, i32 %n)"""
    entry, where, leave, stamps = "", "", "", [""] * STAMPS
    if traced:
        entry = f"""
  %sp = getelementptr i8, ptr %s, i64 {TABLE + 16}
  %stamps = load ptr, ptr %sp, align 8
  %t = load i64, ptr %rt, align 8
  %first = mul i64 %t, %entries"""
        where = f"""
  %own = add i64 %first, %i
  %stamp0 = getelementptr [{STAMPS} x i64], ptr %stamps, i64 %own
  %stamp1 = getelementptr i8, ptr %stamp0, i64 8
  %stamp2 = getelementptr i8, ptr %stamp0, i64 16"""
        leave = meet.replace("%n", "%m")
        stamps = [
            f"""
  %now{i} = call i64 @now()
  store i64 %now{i}, ptr %stamp{i}, align 8"""
            for i in range(STAMPS)
        ]
    body = f"""{where}
  %f = load ptr, ptr %rec, align 8
  %ap = getelementptr i8, ptr %rec, i64 8
  %args = load ptr, ptr %ap, align 8
  %cp = getelementptr i8, ptr %rec, i64 {COUNTERS}{stamps[0]}
  call void %f(ptr %rt, ptr %args, ptr %cp){stamps[1]}
  %bp = getelementptr i8, ptr %rec, i64 {BARRIER}
  %b = load i64, ptr %bp, align 8
  %sync = icmp ne i64 %b, 0
  br i1 %sync, label %meet, label %next
meet:{meet}
  br label %next
next:{stamps[2]}"""
    return _over_table(name, body, entry=entry, leave=leave)


_RESET = f"""
  %cp = getelementptr i8, ptr %rec, i64 {COUNTERS}
  call void @llvm.memset.inline.p0.i64(ptr align 32 %cp, i8 0, i64 {4 * GROUPS}, i1 false)
  br label %next
next:"""


def ir(*, arm: bool, futex: bool) -> str:
    """LLVM IR of the module: `worker(rt, shared)` runs until `stop`, `lead(rt, shared)` makes one pass over the table, `now()`."""
    machine = "arm" if arm else "x86"
    declare_pause, pause = _PAUSE[machine]
    number = _FUTEX[machine]
    if futex:
        declares = "declare i64 @syscall(i64, ...)"
        sleep, wake = _SLEEP_FUTEX.format(number=number), _WAKE_FUTEX.format(number=number)
    else:
        names = ("mutex_lock(ptr", "mutex_unlock(ptr", "cond_wait(ptr, ptr", "cond_broadcast(ptr")
        declares = "\n".join(f"declare i32 @pthread_{n})" for n in names)
        sleep, wake = _SLEEP_CONDITION, _WAKE_CONDITION
    return f"""
{declare_pause}
declare void @llvm.memset.inline.p0.i64(ptr, i8, i64, i1)
{declares}

; the processor's steady counter, the same on every core
{_COUNTER[machine]}

; return once *word differs from old
define internal void @await(ptr %s, ptr %word, i32 %old) {{
entry:
  br label %look
look:
  %i = phi i32 [0, %entry], [%i1, %again], [0, %slept]
  %now = load atomic i32, ptr %word acquire, align 4
  %moved = icmp ne i32 %now, %old
  br i1 %moved, label %done, label %wait
wait:
  {pause}
  %i1 = add i32 %i, 1
  %spin = icmp ult i32 %i, {SPINS}
  br i1 %spin, label %again, label %sleep
again:
  br label %look
sleep:
  %sp = getelementptr i8, ptr %s, i64 {SLEEPERS}
  %s0 = atomicrmw add ptr %sp, i32 1 seq_cst
  br label %slow
slow:{sleep}
  br label %woken
woken:
  %s1 = atomicrmw sub ptr %sp, i32 1 seq_cst
  br label %slept
slept:
  br label %look
done:
  ret void
}}

; move *word on and wake whoever sleeps
define internal void @announce(ptr %s, ptr %word) {{
entry:
  %o = atomicrmw add ptr %word, i32 1 seq_cst
  %sp = getelementptr i8, ptr %s, i64 {SLEEPERS}
  %n = load atomic i32, ptr %sp seq_cst, align 4
  %any = icmp ne i32 %n, 0
  br i1 %any, label %wake, label %done
wake:{wake}
  br label %done
done:
  ret void
}}

define internal void @barrier(ptr %s, i32 %threads) {{
entry:
  %gp = getelementptr i8, ptr %s, i64 {GENERATION}
  %g = load atomic i32, ptr %gp acquire, align 4
  %o = atomicrmw add ptr %s, i32 1 acq_rel
  %o1 = add i32 %o, 1
  %last = icmp eq i32 %o1, %threads
  br i1 %last, label %release, label %hold
release:
  store atomic i32 0, ptr %s monotonic, align 4
  call void @announce(ptr %s, ptr %gp)
  ret void
hold:
  call void @await(ptr %s, ptr %gp, i32 %g)
  ret void
}}

{_walk("walk", traced=False)}{_walk("walk_traced", traced=True)}{_over_table("reset", _RESET)}
define internal void @pass(ptr %rt, ptr %s) {{
  %sp = getelementptr i8, ptr %s, i64 {TABLE + 16}
  %stamps = load ptr, ptr %sp, align 8
  %plain = icmp eq ptr %stamps, null
  br i1 %plain, label %untraced, label %traced
untraced:
  call void @walk(ptr %rt, ptr %s)
  ret void
traced:
  call void @walk_traced(ptr %rt, ptr %s)
  ret void
}}

define void @worker(ptr %rt, ptr %s) {{
entry:
  %jp = getelementptr i8, ptr %s, i64 {JOB}
  br label %idle
idle:
  ; jobs are numbered from 1; a worker that comes late finds its first one waiting
  %seen = phi i32 [0, %entry], [%job, %work]
  call void @await(ptr %s, ptr %jp, i32 %seen)
  %job = load atomic i32, ptr %jp acquire, align 4
  %xp = getelementptr i8, ptr %s, i64 {STOP}
  %x = load atomic i32, ptr %xp acquire, align 4
  %stop = icmp ne i32 %x, 0
  br i1 %stop, label %done, label %work
work:
  call void @pass(ptr %rt, ptr %s)
  br label %idle
done:
  ret void
}}

; the last entry of a table has its barrier flag set, so nobody is still at work when this returns
define void @lead(ptr %rt, ptr %s) {{
  call void @reset(ptr %rt, ptr %s)
  %jp = getelementptr i8, ptr %s, i64 {JOB}
  call void @announce(ptr %s, ptr %jp)
  call void @pass(ptr %rt, ptr %s)
  ret void
}}

define void @stop(ptr %s) {{
  %xp = getelementptr i8, ptr %s, i64 {STOP}
  store atomic i32 1, ptr %xp seq_cst, align 4
  %jp = getelementptr i8, ptr %s, i64 {JOB}
  call void @announce(ptr %s, ptr %jp)
  ret void
}}
"""
