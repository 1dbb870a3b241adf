"""The problems that programs have on a GPU, the configurations that are tried, and programs lowered with one of them."""

from collections.abc import Iterable
from dataclasses import replace

from barellm.cuda import gemm_config, tuning
from barellm.cuda.attention_config import AttentionConfig
from barellm.cuda.kernel import Call, Launch, Specialisation, Target
from barellm.cuda.kernels.gemm.matmul import gemm
from barellm.cuda.kernels.pointwise.activations import IN_EPILOGUES
from barellm.cuda.step import LoweredPrograms, lower_and_plan
from barellm.cuda.tuner.cases import Case, case_of
from barellm.cuda.tuning import AttentionProblem, GemmProblem, Problem
from barellm.program.builder import Program
from barellm.runtime.tuner.problem import Candidate

SLOPES = tuple(f"{name}_backward" for name in IN_EPILOGUES)
EPILOGUES_BY_KIND = {
    "nt": ("", *IN_EPILOGUES, "residual", *SLOPES),
    "nn": ("", *SLOPES),
    "tn": ("", "add", "start"),
}  # epilogues that the harness has
KERNELS = {
    "forward": ("attention_forward", "hopper_attention"),
    "keys": ("attention_dkv", "hopper_attention_backward"),
    "queries": ("attention_dq", "hopper_attention_backward"),
}
ATTENTION_RATE = 0.4  # of a GEMM's FLOP/s that attention reaches, to tell what takes longest


def problems_of(programs: dict[str, Program], target: Target) -> list[Problem]:
    """The tuning problems of these programs, by estimated time: operations times calls, attention at a lower rate."""
    with tuning.counting() as counts:
        lower_and_plan(programs, target)

    def seconds(problem: Problem) -> float:
        return counts[problem] * problem.flops / (1.0 if isinstance(problem, GemmProblem) else ATTENTION_RATE)

    known = [p for p in counts if isinstance(p, AttentionProblem) or p.epilogue in EPILOGUES_BY_KIND[p.operation]]
    return sorted(known, key=seconds, reverse=True)


def candidates(problem: Problem, target: Target) -> list[Candidate]:
    """The default first. All have its bits."""
    default = problem.default(target.arch, target.sms)
    return [Candidate(config) for config in dict.fromkeys((default, *problem.configs(target.arch)))]


def refined(best: Candidate) -> list[Candidate]:
    """The candidates to try when the best configuration is known: other rasterization orders."""
    if isinstance(best.config, AttentionConfig):
        return []
    return [Candidate(config) for config in gemm_config.rasterizations(best.config)[1:]]


def rivals(problem: Problem, target: Target) -> list[Candidate]:
    """The candidates whose results are not bitwise equal to the default's."""
    if isinstance(problem, GemmProblem):
        return []
    return [Candidate(config, other_bits=True) for config in problem.rivals(target.arch)]


def lowered(problem: Problem, case: Case, candidate: Candidate, target: Target) -> tuple[Program, LoweredPrograms]:
    """(the case's program, lowered with the candidate's configuration), with a faulty kernel if the candidate has a fault."""
    p = case.program()
    tf32 = problem.dtype == "tf32" if isinstance(problem, GemmProblem) else target.tf32
    matmul = "triton" if isinstance(problem, GemmProblem) and problem.kernel == "triton" else "barellm"
    plain = isinstance(candidate.config, AttentionConfig) and not candidate.config.warp_specialized
    target = replace(target, tf32=tf32, matmul=matmul, plain_attention=plain, config={problem.operation: candidate.config})
    with tuning.counting() as requested:
        made = lower_and_plan({"op": p}, target)
    assert requested[problem] == 1, f"{p.ops} asked for {list(requested)}, not for {problem}"
    if candidate.fault:
        from barellm.cuda.tuner import faults

        for launch in made.lowered["op"].launches:
            if isinstance(launch, Launch) and launch.spec.function is gemm:
                constants = tuple(sorted([*launch.spec.constants, ("FAULT", candidate.fault)]))
                launch.spec = replace(launch.spec, function=faults.faulty, constants=constants)
    return p, made


def specs_of(problem: Problem, tried: Iterable[Candidate], target: Target) -> dict[Specialisation, str]:
    """The kernel instances that the child will launch for these candidates."""
    case, specs = case_of(problem), {}
    for candidate in tried:
        specs |= lowered(problem, case, candidate, target)[1].specs
    return specs


def is_timed(problem: Problem, call: Call) -> bool:
    """Whether a call of the case's program is the kernel that is tuned."""
    if isinstance(problem, GemmProblem):
        return True
    return isinstance(call, Launch) and call.spec.name in KERNELS[problem.operation]
