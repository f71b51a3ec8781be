"""What obstore's exceptions mean: come again later, never like this, no such object, or the key is taken.

Promises: every exception becomes `StoreUnavailable` only if a later try of the same request may succeed, else a
`StoreUnusable` that names the setting to change, or the builtin error that the caller expects. obstore tells most of
this only in its messages; reading those is done here and nowhere else. Sends nothing and retries nothing.
"""

import os
import re

from obstore.exceptions import AlreadyExistsError, InvalidPathError, NotSupportedError, PreconditionError

from hsray.errors import StoreUnavailable, StoreUnusable

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"(?:code|reason)\": ?\"(\w+)\"")
_TRANSPORT_KIND = re.compile(r"HttpError \{\s+kind: (\w+)")
_CAUSE = re.compile(r"(?:message|error): \"([^\"]+)\"")
# Where a client looks for credentials when the environment has none: AWS, Google, Azure.
_METADATA_SERVICE = re.compile(r"http\S+/(?:latest/(?:api/token|meta-data)|computeMetadata|metadata/identity)")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
# Answers of the 4xx kind that only mean: not now.
_TRANSIENT_CODES = {
    "RequestTimeout",
    "SlowDown",
    "IncompleteBody",
    "BadDigest",
    "OperationAborted",
    "ConditionalRequestConflict",
    "rateLimitExceeded",
    "userRateLimitExceeded",
}
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_TRANSIENT_OS_ERRORS = {4, 11, 23, 24, 110, 116}  # EINTR EAGAIN ENFILE EMFILE ETIMEDOUT ESTALE
_NO_ROOM_OS_ERRORS = {27, 28, 122}  # EFBIG ENOSPC EDQUOT


class KeyExists(Exception):
    """A conditional put found the key taken, perhaps by an earlier try of the same put."""


def translate(err: Exception, operation: str, where: str, url: str) -> Exception:
    """The exception to raise for what obstore raised."""
    text = str(err)
    what = f"{operation} {where}"
    brief = brief_reason(err)
    if isinstance(err, InvalidPathError):
        return ValueError(f"{what}: {brief}")
    status_match = _STATUS.search(text)
    status = int(status_match[1]) if status_match else None
    code = _error_code(text)
    if is_missing_bucket(text):
        return StoreUnusable(f"{what}: the bucket of {url} does not exist. Create it, or correct output.url")
    if isinstance(err, FileNotFoundError):
        if operation in ("put", "create"):
            return StoreUnusable(f"{what}: refused: {brief}. Check output.url")
        return FileNotFoundError(where)
    if isinstance(err, AlreadyExistsError | PreconditionError):
        return KeyExists(f"{what}: {brief}") if operation == "create" else StoreUnavailable(f"{what}: {brief}")
    if isinstance(err, NotImplementedError | NotSupportedError):
        hint = "; set output.commit: single-writer if only one driver ever writes here" if operation == "create" else ""
        return StoreUnusable(f"{what}: the store cannot do this ({brief}){hint}")
    if isinstance(err, OSError) and err.errno is not None:
        return _translate_local(err.errno, operation, what, brief)
    if os_error := _OS_ERROR.search(text):
        return _translate_local(int(os_error[1]), operation, what, brief)
    if text.startswith(("Generic LocalFileSystem error", "Generic InMemory error")):
        return StoreUnusable(f"{what}: {brief}")
    credentials = _CREDENTIALS.get(url.partition("://")[0], "credentials")
    if _METADATA_SERVICE.search(text):
        no_credentials = f"{what}: no credentials. Set {credentials}, or give this machine a role ({brief})"
        return (StoreUnusable if status in (401, 403, 404) else StoreUnavailable)(no_credentials)
    if status is not None:
        return _translate_status(status, code, what, brief, credentials)
    return _translate_transport(text, what, brief)


def _translate_status(status: int, code: str, what: str, brief: str, credentials: str) -> Exception:
    if code in _EXPIRED_CODES:
        if os.environ.get("AWS_SESSION_TOKEN"):
            return StoreUnusable(
                f"{what}: AWS_SESSION_TOKEN has expired. Set new credentials; the same command then resumes"
            )
        return StoreUnavailable(f"{what}: the credentials have expired and are being renewed ({code})")
    if status in (408, 409, 429) or code in _TRANSIENT_CODES or (status >= 500 and status not in (501, 505)):
        return StoreUnavailable(f"{what}: {brief}")
    if code == "RequestTimeTooSkewed":
        return StoreUnusable(f"{what}: this machine's clock is wrong ({code}). Set it, for example with NTP")
    if status in (401, 403):
        return StoreUnusable(
            f"{what}: access denied ({f'{status} {code}'.rstrip()}). Check {credentials}, or the machine's role, "
            "and that they may read, write and list under output.url"
        )
    if code in ("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect") or 300 <= status < 400:
        return StoreUnusable(f"{what}: wrong region ({brief}). Set output.storage_options.region or AWS_REGION")
    return StoreUnusable(f"{what}: refused: {brief}")


def _translate_local(os_error: int, operation: str, what: str, brief: str) -> Exception:
    if os_error in _TRANSIENT_OS_ERRORS:
        return StoreUnavailable(f"{what}: {brief}")
    if os_error in _NO_ROOM_OS_ERRORS:
        return StoreUnusable(f"{what}: no room ({brief}). Free space or raise the quota; the same command then resumes")
    if operation == "create" and os_error in (1, 38, 95):  # EPERM ENOSYS EOPNOTSUPP of link(2)
        return StoreUnusable(
            f"{what}: this file system has no hard links ({brief}), which put-if-absent needs. Use another output.url, "
            "or set output.commit: single-writer if only one driver ever writes here"
        )
    if os_error in (1, 13, 30):  # EPERM EACCES EROFS
        return StoreUnusable(f"{what}: not permitted ({brief}). Give this user write access, or change output.url")
    return StoreUnusable(f"{what}: {brief}. Check output.url")


def _translate_transport(text: str, what: str, brief: str) -> Exception:
    """No answer with a status: the network, TLS, or the client's own configuration."""
    if "BadScheme" in text or "URL scheme is not allowed" in text:
        return StoreUnusable(
            f"{what}: the endpoint is http://. Set output.storage_options.allow_http: true, or use https://"
        )
    if "InvalidContentType" in text:
        return StoreUnusable(
            f"{what}: the endpoint does not speak TLS. Write http:// in output.storage_options.endpoint"
        )
    if "InvalidCertificate" in text or "UnknownIssuer" in text:
        return StoreUnusable(
            f"{what}: the endpoint's certificate is not trusted. Set output.storage_options.client_options."
            "root_certificate to your CA in PEM"
        )
    if "Received redirect without LOCATION" in text:
        return StoreUnusable(f"{what}: wrong region. Set output.storage_options.region or AWS_REGION")
    if "AccessDenied" in text:
        return StoreUnusable(f"{what}: access denied ({brief}). Check what the credentials may do under output.url")
    return StoreUnavailable(f"{what}: {brief}")


def is_missing_bucket(text: str) -> bool:
    """Whether a message of obstore is about the bucket or container itself, not about an object in it."""
    return any(word in text for word in _MISSING_BUCKET)


def _error_code(text: str) -> str:
    """The store's own word for what is wrong, or nothing."""
    match = _CODE.search(text)
    return (match[1] or match[2]) if match else ""


def brief_reason(err: BaseException) -> str:
    """What obstore says, in a few words: the status and the store's code, or why there was no answer."""
    text = str(err)
    if status := _STATUS.search(text):
        return f"answer {status[1]} {_error_code(text)}".rstrip()
    kind = _TRANSPORT_KIND.search(text)
    if kind is None:
        return first_line(err)
    causes = [match[1] for match in _CAUSE.finditer(text)]
    return f"no answer ({kind[1].lower()}{': ' + causes[-1] if causes else ''})"


def first_line(err: BaseException) -> str:
    """obstore's message without its debug part, on one line, at most 300 characters."""
    text = " ".join(str(err).split("Debug source:")[0].split())
    return text if len(text) <= 300 else text[:297] + "..."
