"""Who may use an agent, and with which settings an agent refuses to start."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc

from agent import security
from agent.client import AgentClient
from agent.security import ClientSecurity, Presented, Requirements, ServerSecurity, check_pair, read_tokens
from everstep.base.addresses import is_loopback
from everstep.errors import AgentError, AgentRefuses, ConfigError
from everstep.rank import environment
from tests.agent.agents import HOST, RunningAgent, running_agent, until
from tests.strangers import python_as_nobody


async def test_tls_and_token(tmp_path: Path, keys: Path) -> None:
    right = ClientSecurity(ca_file=keys / "cert.pem", token_file=keys / "token")
    options = ("--tls-cert", keys / "cert.pem", "--tls-key", keys / "key.pem", "--token-file", keys / "token")
    async with running_agent(tmp_path, *map(str, options), security=right) as agent:
        assert (await agent.client.describe()).machine == "m1"
        for wrong in (
            ClientSecurity(ca_file=keys / "cert.pem"),
            ClientSecurity(ca_file=keys / "cert.pem", token_file=keys / "wrong"),
        ):
            async with AgentClient(agent.address, Presented(wrong)) as client:
                with pytest.raises(AgentError, match="no valid token"):
                    await client.describe()
        async with AgentClient(agent.address, Presented(ClientSecurity(token_file=keys / "token"))) as plain:
            with pytest.raises(AgentError):
                await plain.describe()


IMPORTS = """
import sys
import grpc
from grpc_health.v1 import health_pb2_grpc
from agent.v1 import agent_pb2, agent_pb2_grpc
grpc.insecure_channel("127.0.0.1:1").close()  # it imports more when it is first called
"""
CALLS = """
address, token_file = sys.argv[1:]
try:
    open(token_file).read()
except PermissionError:
    print("unreadable")
names = [f"/everstep.agent.v1.Agent/{method.name}" for method in agent_pb2.DESCRIPTOR.services_by_name["Agent"].methods]
names += ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/List"]
names += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no.such.Service/Method"]
given = {"none": (), "wrong": (("authorization", "Bearer guessed"),), "half": (("authorization", "Bearer "),)}
with grpc.insecure_channel(address) as channel:
    for name in names:
        for what, metadata in given.items():
            try:
                list(channel.unary_stream(name)(b"", metadata=metadata, timeout=10))
            except grpc.RpcError as error:
                code = error.code()
            else:
                code = None
            if code != grpc.StatusCode.UNAUTHENTICATED:
                print(name, what, code)
    token = (("authorization", "Bearer " + sys.stdin.read().strip()),)
    reply = agent_pb2_grpc.AgentStub(channel).Describe(agent_pb2.DescribeRequest(), metadata=token, timeout=10)
    print(len(names) > 20, reply.machine)
"""


async def test_another_user_can_call_nothing_without_the_token(tmp_path: Path, token_file: Path) -> None:
    token = await asyncio.to_thread(token_file.read_text)
    async with running_agent(tmp_path) as agent:
        done = await asyncio.to_thread(python_as_nobody, IMPORTS, CALLS, agent.address, str(token_file), given=token)
        assert done.stdout.splitlines() == ["unreadable", "True m1"], done.stderr


async def test_health_is_told_to_those_who_have_the_token(tmp_path: Path, keys: Path) -> None:
    right = ClientSecurity(token_file=keys / "token")
    async with running_agent(tmp_path, "--token-file", str(keys / "token"), security=right) as agent:
        async with grpc.aio.insecure_channel(agent.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="everstep.agent.v1.Agent")
            reply = await stub.Check(request, metadata=right.read().metadata())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_agent_without_a_token_needs_to_be_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.AGENT_TOKEN_FILE)
    with pytest.raises(RuntimeError, match="refusing to serve without a token: any user of this machine"):
        async with running_agent(tmp_path):
            pass
    async with running_agent(tmp_path, "--insecure") as agent:
        assert (await agent.client.describe()).machine == "m1"
    with pytest.raises(ConfigError, match=r"refusing to listen on 10\.1\.2\.3"):
        ServerSecurity(insecure=True).check("10.1.2.3")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "machine-7", "::"])
def test_an_open_agent_is_refused(host: str, keys: Path) -> None:
    assert not is_loopback(host)
    half = ServerSecurity(tls_cert=keys / "cert.pem", tls_key=keys / "key.pem")
    for given in (ServerSecurity(), ServerSecurity(token_file=keys / "token"), half):
        with pytest.raises(ConfigError, match=f"refusing to listen on {host}"):
            given.check(host)
    ServerSecurity(keys / "cert.pem", keys / "key.pem", keys / "token").check(host)


def test_half_a_pair_and_missing_files_are_named(keys: Path) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        ServerSecurity(tls_cert=keys / "cert.pem").check("127.0.0.1")
    with pytest.raises(ConfigError, match=r"token file .*nonsuch cannot be read"):
        Requirements(ServerSecurity(token_file=keys / "nonsuch"))


def issued(folder: Path, name: str, days: int) -> tuple[Path, Path]:
    """Return a certificate and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days), "-subj", "/CN=m1"]
    named = ["-addext", f"subjectAltName=IP:{HOST}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert), *named], check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize(
    ("days", "told"), [(105, "expired 5.0 days ago: issue another one"), (-3, "is valid in 3.0 days only: correct it")]
)
def test_an_agent_starts_with_a_certificate_of_another_time_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, told: str
) -> None:
    """An agent that does not start looks like a machine that is gone."""
    cert, key = issued(tmp_path, "good", 100)
    now = time.time() + days * 86_400
    monkeypatch.setattr(security, "time", SimpleNamespace(time=lambda: now))

    with structlog.testing.capture_logs() as logs:
        Requirements(ServerSecurity(tls_cert=cert, tls_key=key))
    [line] = logs
    assert (line["log_level"], told in str(line["problem"])) == ("error", True)


def test_a_certificate_that_cannot_be_used_is_told_at_the_start(tmp_path: Path, keys: Path) -> None:
    good, key = issued(tmp_path, "good", 100)
    check_pair(good, key)
    _, other = issued(tmp_path, "other", 100)
    bad = tmp_path / "bad.crt"
    bad.write_text("no PEM")
    for cert, its_key, told in (
        (good, other, "does not belong to the certificate"),
        (bad, key, "are no certificate and unencrypted key in PEM"),
    ):
        with pytest.raises(ConfigError, match=told):
            Requirements(ServerSecurity(tls_cert=cert, tls_key=its_key, token_file=keys / "token"))


def test_each_line_is_a_token_and_empty_lines_are_not(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("\nnew \n\nold\n")
    assert read_tokens(path) == (b"new", b"old")
    assert ClientSecurity(token_file=path).read().token == b"new"
    for bad, told in (("\n \n", "is empty"), ("päss\n", "printable ASCII"), ("a\x00b", "printable ASCII")):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=told):
            read_tokens(path)


async def answers(client: AgentClient) -> bool:
    """Return whether the agent accepts a call of a client."""
    try:
        await client.describe(timeout_s=10)
    except AgentRefuses:
        return False
    return True


async def until_it(agent: RunningAgent, security: ClientSecurity, *, accepts: bool) -> None:
    """Wait until an agent accepts, or refuses, new callers with these files."""
    deadline = time.monotonic() + 30
    while True:
        async with AgentClient(agent.address, Presented(security)) as client:
            if await answers(client) == accepts:
                return
        assert time.monotonic() < deadline, f"the agent should answer: {accepts}"
        await asyncio.sleep(0.05)


async def test_a_token_replaces_another_one_without_a_restart_or_a_failed_call(tmp_path: Path) -> None:
    of_agent, of_caller, old, new = (tmp_path / name for name in ("agent", "caller", "old", "new"))
    for path, text in ((of_agent, "one\n"), (of_caller, "one\n"), (old, "one\n"), (new, "two\n")):
        path.write_text(text)
    caller = ClientSecurity(token_file=of_caller)
    async with running_agent(tmp_path / "m1", "--token-file", str(of_agent), security=caller) as agent:
        assert not await answers(AgentClient(agent.address, Presented(ClientSecurity(token_file=new))))
        of_agent.write_text("one\ntwo\n")
        await until_it(agent, ClientSecurity(token_file=new), accepts=True)
        assert await answers(agent.client)
        of_caller.write_text("two\none\n")
        assert await answers(agent.client)
        of_agent.write_text("two\n")
        await until_it(agent, ClientSecurity(token_file=old), accepts=False)
        assert await answers(agent.client), "a client that is refused reads its file again, and repeats its call"


async def test_a_damaged_token_file_changes_nothing(tmp_path: Path) -> None:
    path, mine = tmp_path / "token", tmp_path / "mine"
    path.write_text("one\n")
    mine.write_text("one\n")
    async with running_agent(tmp_path / "m1", "--token-file", str(path), security=ClientSecurity(None, mine)) as agent:
        path.write_text("")
        await until(lambda: "the earlier ones stay valid" in agent.log(), "the agent has read the empty file")
        assert await answers(agent.client)
        path.write_text("two\n")
        await until_it(agent, ClientSecurity(token_file=mine), accepts=False)


async def test_new_certificates_of_a_new_authority_are_read_without_a_restart(tmp_path: Path, keys: Path) -> None:
    first, second = issued(tmp_path, "first", 100), issued(tmp_path, "second", 100)
    cert, key, authority = tmp_path / "cert", tmp_path / "key", tmp_path / "authority"
    shutil.copy(first[0], cert)
    shutil.copy(first[1], key)
    authority.write_text(first[0].read_text())
    caller = ClientSecurity(authority, keys / "token")
    options = ("--tls-cert", cert, "--tls-key", key, "--token-file", keys / "token")
    async with running_agent(tmp_path / "m1", *map(str, options), security=caller) as agent:
        authority.write_text(first[0].read_text() + second[0].read_text())
        shutil.copy(second[0], cert)
        shutil.copy(second[1], key)
        await until_it(agent, ClientSecurity(second[0], keys / "token"), accepts=True)
        old = ClientSecurity(first[0], keys / "token")
        async with AgentClient(agent.address, Presented(old)) as client:
            with pytest.raises(AgentRefuses, match="do not accept each other"):
                await client.describe()
        assert await answers(agent.client)
        agent.kill()
        await agent.start()
        assert await answers(agent.client), "the same client reaches the agent by the new certificate"


async def test_who_shows_no_certificate_or_the_wrong_one_is_told_which_setting_helps(
    tmp_path: Path, keys: Path
) -> None:
    cert, key = issued(tmp_path, "other", 100)
    right = ClientSecurity(keys / "cert.pem", keys / "token", keys / "cert.pem", keys / "key.pem")
    pair = ("--tls-cert", keys / "cert.pem", "--tls-key", keys / "key.pem", "--token-file", keys / "token")
    options = (*pair, "--tls-client-ca", keys / "cert.pem")
    async with running_agent(tmp_path, *map(str, options), security=right) as agent:
        for wrong, told in (
            (ClientSecurity(keys / "cert.pem", keys / "token"), "name one in EVERSTEP_AGENT_CERT_FILE"),
            (ClientSecurity(keys / "cert.pem", keys / "token", cert, key), "name one in EVERSTEP_AGENT_CERT_FILE"),
            (ClientSecurity(cert, keys / "token"), "not signed by the authority in EVERSTEP_AGENT_CA_FILE"),
        ):
            async with AgentClient(agent.address, Presented(wrong)) as client:
                with pytest.raises(AgentError, match=told):
                    await client.describe()


async def test_what_an_agent_cannot_start_with(tmp_path: Path) -> None:
    async with running_agent(tmp_path) as agent:
        taken = RunningAgent(tmp_path / "other")
        taken.address = agent.address
        same = RunningAgent(tmp_path)
        nonsense = RunningAgent(tmp_path / "third")
        nonsense.address = "here"
        wrong = {
            taken: "is taken: stop a program that uses one",
            same: "another agent uses",
            nonsense: "is not host:port",
        }
        for bad, message in wrong.items():
            bad.folder.mkdir(exist_ok=True)
            done = subprocess.run(bad.command(), check=False, capture_output=True, text=True)  # noqa: ASYNC221
            assert done.returncode == 2
            assert message in done.stderr
            assert "Traceback" not in done.stderr
            if bad.shm.exists():
                bad.shm.rmdir()
            await bad.close()
        assert (await agent.client.describe()).machine == "m1"
