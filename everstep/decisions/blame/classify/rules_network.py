"""Rules for lines about name resolution, ports and services outside the cluster."""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule
from everstep.decisions.blame.classify.rules_storage import OBJECT_STORE
from everstep.model.finding import Owner

LLM_ERROR = "API(?:Timeout|Connection)Error|RateLimitError|InternalServerError|OverloadedError|ServiceUnavailableError"
"""Errors of clients of language models that blame the service, not the request."""
NETWORK_RULES = (
    LogRule(
        "name-resolution",
        FaultClass.DNS,
        Owner.NETWORK,
        hints=(
            "name resolution|name or service not known|nodename nor servname|gaierror|name does not resolve"
            "|could not resolve host|nameresolutionerror|no address associated"
        ),
        pattern=(
            "[Tt]emporary failure in name resolution|Name or service not known|nodename nor servname|gaierror"
            "|Name does not resolve|Could not resolve host|NameResolutionError|No address associated with hostname"
        ),
        source="getaddrinfo of glibc and musl; curl; urllib3",
        matches=(
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "curl: (6) Could not resolve host: data.example",
            "socket.gaierror: [Errno -2] Name or service not known",
        ),
        misses=("name resolution took 3 ms",),
    ),
    LogRule(
        "port-taken",
        FaultClass.PORT_TAKEN,
        Owner.MACHINE,
        hints="address already in use|eaddrinuse|errno 98",
        pattern=r"[Aa]ddress already in use|EADDRINUSE|\[Errno 98\]",
        source="Linux: EADDRINUSE; torch's TCPStore",
        matches=(
            "OSError: [Errno 98] Address already in use",
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network "
            "address. port: 29500, code: -98, name: EADDRINUSE, message: address already in use",
        ),
        misses=("addresses in use: 3",),
    ),
    LogRule(
        "external-service-refused",
        FaultClass.EXTERNAL_SERVICE,
        Owner.CODE,
        hints="client error|gatedrepo|notfounderror",
        pattern=(
            r"\b4(?:0[0134567]|1\d|22) Client Error|GatedRepoError|(?<!Local)(?<!Module)\b(?:Repository|Revision|Entry)"
            "NotFoundError"
        ),
        source="requests, huggingface_hub: the service answers that the request is wrong",
        matches=(
            "requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://huggingface.co/api/models/a",
            "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1)",
        ),
        misses=(
            "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://huggingface.co/api",
            "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co",
            "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to "
            "locate the file on the Hub",
        ),
    ),
    LogRule(
        "external-service",
        FaultClass.EXTERNAL_SERVICE,
        Owner.EXTERNAL,
        hints=(
            "httpsconnectionpool|httpconnectionpool|max retries exceeded|hfhub|localentrynotfound|wandb|urlopen error"
            "|http error|server error|client error|too many requests|newconnectionerror|couldn't connect to"
            "|we couldn't connect|bad gateway|service unavailable|connecterror|remotedisconnected|http code"
            "|returned error|aiohttp|openai|anthropic|litellm|raytaskerror|state=finished"
        ),
        pattern=(
            rf"^(?!.*(?:{OBJECT_STORE})).*?"
            r"(?:HTTPS?ConnectionPool\(|Max retries exceeded|LocalEntryNotFoundError|couldn't connect to '?https?://"
            r"|HfHubHTTPError|OfflineModeIsEnabled|wandb\S*:? .*(?:Network error|CommError|ConnectionError|timed out)"
            r"|CommError|<urlopen error|HTTP Error (?:5\d\d|429)|HTTPError: (?:5\d\d|429)|[45]\d\d (?:Server"
            "|Client) Error|NewConnectionError|(?:502 Bad Gateway|503 Service Unavailable|429 Too Many Requests)"
            r"|aiohttp\S*\.(?:Server(?:Disconnected|Timeout)|ClientPayload|ClientConnector|ClientOS)Error"
            r"|httpx\.Connect\w+|httpcore\.Connect\w+|RemoteDisconnected|The requested URL returned error: (?:5\d\d"
            rf"|429)|\b(?:openai|anthropic|litellm)\b\S*\.(?:{LLM_ERROR}|Timeout)\b|RayTaskError\((?:{LLM_ERROR})\)"
            rf"|state=finished raised (?:{LLM_ERROR})\b)"
        ),
        source="requests, urllib3, urllib, httpx, aiohttp, huggingface_hub, wandb, curl, openai, anthropic, litellm",
        matches=(
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries "
            "exceeded",
            "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>",
            "urllib.error.HTTPError: HTTP Error 503: Busy",
            "HTTPError: 504 Server Error: Gateway Time-out for url: https://huggingface.co/api/models/a/commit/main",
            "wandb: Network error (ConnectionError), entering retry loop.",
            "openai.APITimeoutError: Request timed out.",
            "openai.RateLimitError: Error code: 429 - {'error': {'message': 'Rate limit reached'}}",
            "anthropic._exceptions.OverloadedError: Error code: 529",
            "ray.exceptions.RayTaskError(APITimeoutError): ray::TaskRunner.run() (pid=9609, ip=10.14.9.72)",
            "tenacity.RetryError: RetryError[<Future at 0x7f2a state=finished raised APIConnectionError>]",
        ),
        misses=(
            "wandb: Run data is saved locally",
            "http errors: 0",
            "openai.BadRequestError: Error code: 400 - {'error': {'message': 'too many tokens'}}",
            "openai.AuthenticationError: Error code: 401",
            "judge.RateLimitError: two rewards per step",
            "ray.exceptions.RayTaskError(ValueError): ray::TaskRunner.run() (pid=9609, ip=10.14.9.72)",
            "urllib3.exceptions.ReadTimeoutError: AWSHTTPSConnectionPool(host='b.s3.amazonaws.com', port=443): Read "
            "timed out.",
        ),
    ),
    LogRule(
        "network-unreachable",
        FaultClass.NETWORK,
        Owner.NETWORK,
        hints="no route to host|network is unreachable|connection timed out|network is down",
        pattern=(
            r"No route to host|Network is unreachable|\[Errno 110\]|ConnectionTimedOut|Network is down"
            "|: Connection timed out"
        ),
        source="Linux: EHOSTUNREACH, ENETUNREACH, ETIMEDOUT, ENETDOWN",
        matches=("OSError: [Errno 113] No route to host", "TimeoutError: [Errno 110] Connection timed out"),
        misses=("route to host m3 found",),
    ),
    LogRule(
        "certificate",
        FaultClass.EXTERNAL_SERVICE,
        Owner.UNKNOWN,
        hints="certificate verify failed|certificate_verify_failed",
        pattern="CERTIFICATE_VERIFY_FAILED|certificate verify failed",
        source="OpenSSL",
        matches=(
            "ssl.SSLCertVerificationError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed "
            "certificate",
        ),
        misses=("certificate verified",),
    ),
)
