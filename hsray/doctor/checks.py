"""All checks, in the order in which they are shown."""

from collections.abc import Callable, Iterable

from hsray.doctor import check_environment, check_gpus, check_machine, check_run, check_software
from hsray.doctor.facts import NodeFacts, RunFacts
from hsray.doctor.finding import Finding
from hsray.doctor.subject import Subject

NodeCheck = Callable[[Subject, NodeFacts], Iterable[Finding]]
RunCheck = Callable[[Subject, NodeFacts, RunFacts], Iterable[Finding]]

# On every machine that takes part.
EVERYWHERE: tuple[NodeCheck, ...] = (
    check_software.check_python,
    check_software.check_packages,
    check_machine.check_limits,
    check_machine.check_disks,
    check_machine.check_ports,
    check_environment.check_environment,
    check_run.check_store,
)
# Where replicas run.
PLACES: tuple[NodeCheck, ...] = (
    check_software.check_sglang,
    check_software.check_engine_arguments,
    check_gpus.check_gpus,
    check_gpus.check_gpu_memory,
    check_run.check_model_files,
    check_machine.check_memory,
    check_machine.check_spool,
    check_machine.check_leftovers,
)
# Where the driver runs.
DRIVER: tuple[RunCheck, ...] = (
    check_run.check_ray,
    check_run.check_existing_run,
    check_run.check_local_store,
    check_run.check_tokenizer,
    check_run.check_prompts,
)


def check_node(subject: Subject, node: NodeFacts, *, is_place: bool) -> list[Finding]:
    checks = (*EVERYWHERE, *PLACES) if is_place else EVERYWHERE
    return [finding for check in checks for finding in check(subject, node)]


def check_driver(subject: Subject, node: NodeFacts, run: RunFacts) -> list[Finding]:
    return [finding for check in DRIVER for finding in check(subject, node, run)]
