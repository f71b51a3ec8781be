"""What is left of Ray's long words about a lost actor."""

import pytest
from ray.exceptions import ActorDiedError

from hsray.cluster.errors import cause_of
from hsray.errors import ConfigError, ReplicaLost

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: ReplicaActor
\tactor_id: bf8ec7f7dfe4483b1817858b03000000
\tpid: 25683
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed \
by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly."""
NOT_MADE = """The actor died because of an error raised in its creation task, ray::ReplicaActor.__init__() (pid=19299)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/x/hsray/testing.py", line 170, in __init__
TypeError: FakeBehaviour.__init__() got an unexpected keyword argument 'no_such_argument'
"""
REFUSED = """The actor died because of an error raised in its creation task, ray::ReplicaActor.__init__() (pid=19299)
  File "/x/hsray/log_files.py", line 86, in take_output
hsray.errors.ConfigError: log.dir: cannot write /logs on gpu-7: Read-only file system
"""


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            KILLED,
            ReplicaLost,
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file.",
        ),
        (
            NOT_MADE,
            ReplicaLost,
            "it could not be made: TypeError: FakeBehaviour.__init__() got an unexpected keyword argument "
            "'no_such_argument'",
        ),
        (REFUSED, ConfigError, "log.dir: cannot write /logs on gpu-7: Read-only file system"),
        ("", ReplicaLost, "The actor died unexpectedly before finishing this task."),
    ],
)
def test_a_lost_actor_has_one_line_that_says_why(text: str, kind: type[Exception], message: str) -> None:
    error = ActorDiedError()
    error.base_error_msg = error.error_msg = text or error.error_msg
    error.args = (text or str(error),)

    cause = cause_of(error)

    assert type(cause) is kind
    assert str(cause) == message
