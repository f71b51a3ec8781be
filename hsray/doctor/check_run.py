"""Checks of what a run reads and writes: model files, store, Ray's door, tokenizer and prompts. Pure."""

from collections.abc import Iterator

from hsray.doctor.facts import NodeFacts, RunFacts
from hsray.doctor.finding import STORE, Finding, fail, ok, warn
from hsray.doctor.subject import Subject
from hsray.schema import FORMAT_VERSION
from hsray.units import format_bytes as size

# Signatures of S3 requests are refused from 15 minutes on; long before, times in logs mislead.
_SKEW_SECONDS = 5.0
_SLOW_STORE_SECONDS = 5.0
_SHARED_FILESYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "wekafs",
    "cifs",
    "9p",
    "virtiofs",
    "orangefs",
)
_MANY_REJECTS = 0.5


def check_model_files(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    model = node.model
    if model.error:
        yield fail("model files", model.error, "model.path must be the same local directory on every node")
    elif model.problems:
        yield fail(
            "model files",
            f"{model.path}: {'; '.join(model.problems)}",
            "download the model again, completely (`hf download` goes on where it stopped; `git lfs pull`)",
        )
    else:
        yield ok("model files", f"{model.files} files, {size(model.weight_bytes)} of weights, {model.path}")


def check_store(subject: Subject, node: NodeFacts) -> Iterator[Finding]:
    store = node.store
    if store.error:
        if store.is_config_error:
            yield fail("output.url", store.error, "correct the key that is named")
        else:
            yield fail(STORE, store.error, _store_advice(subject, node))
        return
    mode = subject.config.output.commit
    seen = f"{store.url}: writable, {'put if absent works' if mode == 'conditional' else mode}, {store.seconds:.1f} s"
    if mode == "single-writer":
        yield warn(STORE, seen, "only one driver may ever write here: a second one would not be noticed")
    elif store.seconds > _SLOW_STORE_SECONDS:
        yield warn(STORE, seen, "four small requests took that long: look at the network, proxies and the store's load")
    else:
        yield ok(STORE, seen)
    if store.skew is not None:
        shown = (
            f"the store's clock is {abs(store.skew):.0f} s {'ahead of' if store.skew > 0 else 'behind'} this machine's"
        )
        if abs(store.skew) > _SKEW_SECONDS:
            yield warn("clock", shown, "set the clock with NTP; from 15 minutes on, requests are refused")
        else:
            yield ok("clock", "the store's and this machine's agree")


def _store_advice(subject: Subject, node: NodeFacts) -> str:
    """The error itself says what to change; here, what this machine has to show for it."""
    names = set(node.store.credentials)
    if subject.config.output.url.startswith("s3://"):
        if ("AWS_ACCESS_KEY_ID" in names) != ("AWS_SECRET_ACCESS_KEY" in names):
            only = "AWS_ACCESS_KEY_ID" if "AWS_ACCESS_KEY_ID" in names else "AWS_SECRET_ACCESS_KEY"
            return f"only {only} is set here: set both, on every node (`ray job submit` passes no environment on)"
        if "AWS_PROFILE" in names and "AWS_ACCESS_KEY_ID" not in names:
            return (
                "AWS_PROFILE is not read: export the profile's keys (`aws configure export-credentials --format env`)"
            )
    shown = f"set here: {', '.join(sorted(names))}" if names else "no variable with credentials is set here"
    return f"change what the message names; {shown}"


def check_local_store(subject: Subject, node: NodeFacts, run: RunFacts) -> Iterator[Finding]:
    disk = node.store.disk
    if disk is None:
        return
    tokens = node.store.run.num_tokens if node.store.run else sum(run.inputs.lengths) if run.inputs.is_all else 0
    needed = round(tokens * subject.stored_per_token(run.inputs.shares))
    seen = f"{size(disk.free)} free at {disk.path} ({disk.filesystem})"
    if needed > disk.free:
        yield fail("output disk", f"{seen}; the run takes {size(needed)}", "free space, or change output.url")
    else:
        yield ok("output disk", seen + (f"; the run takes {size(needed)}" if needed else ""))
    if run.ray_address and disk.filesystem not in _SHARED_FILESYSTEMS and not disk.filesystem.startswith("fuse"):
        yield warn(
            "output disk",
            f"{disk.path} is on {disk.filesystem}, a disk of this machine alone",
            "replicas on other nodes would write to theirs: use a bucket or a shared file system",
        )


def check_existing_run(subject: Subject, node: NodeFacts, run: RunFacts) -> Iterator[Finding]:
    found = node.store.run
    if found is None:
        if not node.store.error:
            yield ok("run", "none at output.url yet")
        return
    seen = f"{found.run_id} of {found.created[:16]} is at {node.store.url}"
    differing = [
        f"{key} ({found.parts[key]} there, {value} now)"
        for key, value in run.fingerprint.items()
        if key in found.parts and found.parts[key] != value
    ]
    if found.format_version.partition(".")[0] != str(FORMAT_VERSION):
        yield fail(
            "run", f"{seen}, in format {found.format_version}", "use another output.url, or the hsray it began with"
        )
    elif differing:
        yield fail(
            "run",
            f"{seen}, begun from other inputs: {'; '.join(differing)}",
            "give a new output.url for a new run, or the old settings to continue this one",
        )
    else:
        yield ok("run", f"{seen}; this one would continue it")


def check_ray(subject: Subject, node: NodeFacts, run: RunFacts) -> Iterator[Finding]:
    if not run.ray_address:
        yield ok("ray", f"a local Ray {node.packages.get('ray', '')} starts and ends with the run")
    elif run.ray_error:
        yield fail(
            "ray",
            f"nothing answers at {run.ray_address}: {run.ray_error}",
            "start the cluster (`ray start --head`), correct cluster.address or RAY_ADDRESS, or open the port",
        )
    elif not node.raylets and "://" not in run.ray_address:
        yield fail(
            "ray",
            f"{run.ray_address} answers, but no Ray node runs on this machine",
            "a driver needs one beside it: use `ray job submit`, or `ray start --address` here first",
        )
    else:
        yield ok("ray", f"{run.ray_address}, Ray {node.packages.get('ray', '')}")
    yield from _check_auth(node, run)


def _check_auth(node: NodeFacts, run: RunFacts) -> Iterator[Finding]:
    mode = node.environment.get("RAY_AUTH_MODE", "")
    token = "a token is here" if node.auth_token else "no token is here"
    if mode == "token" and not node.auth_token:
        yield fail(
            "ray authentication",
            "RAY_AUTH_MODE=token, and no token is here",
            "copy the head's ~/.ray/auth_token to this machine, or set RAY_AUTH_TOKEN to what is in it",
        )
    elif not mode and run.ray_address:
        yield warn(
            "ray authentication",
            f"RAY_AUTH_MODE is not set ({token}); hsray then takes `disabled`, others what Ray's version decides",
            "set RAY_AUTH_MODE to disabled or token, the same on every node and wherever `ray job submit` is typed",
        )
    else:
        yield ok("ray authentication", mode or "disabled, as hsray does for a local Ray")


def check_tokenizer(subject: Subject, node: NodeFacts, run: RunFacts) -> Iterator[Finding]:
    if run.tokenizer_error:
        yield fail("tokenizer", run.tokenizer_error, "correct the key that is named, or complete the model's directory")
    else:
        yield ok("tokenizer", "loads" + (", with a chat template" if run.inputs.has_template else ", no chat template"))


def check_prompts(subject: Subject, node: NodeFacts, run: RunFacts) -> Iterator[Finding]:
    inputs, budget = run.inputs, subject.config.budgets.max_rejected_fraction
    if inputs.error:
        if not run.tokenizer_error:
            yield fail("prompts", inputs.error, "correct the key or the file that is named")
        return
    rejected = sum(count for count, _ in inputs.rejects.values())
    first = f"{inputs.files} files, {size(inputs.nbytes)}; "
    first += "all" if inputs.is_all else "the first"
    seen = f"{first} {inputs.rows:,} rows = {len(inputs.lengths):,} prompts + {rejected:,} rejects"
    if inputs.lengths:
        seen += f", {min(inputs.lengths):,} to {max(inputs.lengths):,} tokens"
    reasons = "; ".join(
        f"{reason} {count:,} ({where[:160]})" for reason, (count, where) in list(inputs.rejects.items())[:3]
    )
    plan = "`python -m hsray.plan` shows all rows"
    if not inputs.rows:
        yield fail("prompts", f"{inputs.files} files, and no row in them", "correct prompts.path or prompts.where")
    elif not inputs.lengths:
        yield fail("prompts", f"{seen}: {reasons}", f"correct the prompts section; {plan}")
    elif rejected > _MANY_REJECTS * inputs.rows or rejected > budget * inputs.rows:
        yield warn("prompts", f"{seen}: {reasons}", f"are these meant to be refused? {plan}")
    else:
        yield ok("prompts", seen + (f": {reasons}" if reasons else ""))
