"""Files that describe receivers. Valid files are read, and the error messages about invalid files are checked."""

from __future__ import annotations

import tomllib

import pytest

from activities.notices.settings import NoticeSettings
from everstep.errors import ConfigError

ENV = {"PAGER": "Bearer s3cr3t-value", "HOOK": "https://hooks.example/T0/s3cr3t-value", "BAD": "a\nb: s3cr3t-value"}


def parse(text: str) -> NoticeSettings:
    return NoticeSettings.parse(tomllib.loads(text), ENV, "notices.toml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert str(refused.value).startswith("notices.toml:")
    assert "s3cr3t" not in str(refused.value)
    return str(refused.value)


def test_receivers_of_all_kinds() -> None:
    settings = parse(
        """
        [[receiver]]
        name = "pager"
        kinds = ["parked", "job-failed"]
        url = "https://events.example/v2"
        headers_from = {Authorization = "PAGER"}

        [[receiver]]
        name = "mail"
        command = ["sh", "-c", "exit 0"]
        deadline_s = 5

        [[receiver]]
        name = "chat"
        url_from = "HOOK"

        [[receiver]]
        name = "here"
        url = "http://[::1]:8080/x"
        """
    )

    assert settings.for_kind("parked") == ["pager", "mail", "chat", "here"]
    assert settings.for_kind("pool-empty") == ["mail", "chat", "here"]
    assert settings.for_kind("test") == ["pager", "mail", "chat", "here"]
    assert settings.named("gone") is None


@pytest.mark.parametrize(
    ("receiver", "said"),
    [
        ('name = "x"', "receiver x: give it one of command, url and url_from; it has none"),
        ('name = "x"\nurl = "https://a"\ncommand = ["sh"]', "it has command and url"),
        ('name = "x"\ncommand = ["sh"]\nkinds = ["parkd"]', "there is no kind 'parkd'; did you mean 'parked'?"),
        ('name = "x"\ncommand = ["sh"]\nkinds = ["?"]', "there are parked, breaker-tripped"),
        ('name = "x"\ncommand = ["/no/such"]', "the program '/no/such' does not exist, or is not executable"),
        ('name = "x"\nurl = "http://events.example/"', "write https://; http:// is for addresses of this machine only"),
        ('name = "x"\nurl = "ftp://127.0.0.1/"', "write https://"),
        ('name = "x"\nurl = "https://a:b/"', "it is not a URL"),
        ('name = "x"\nurl = "https:///x"', "it is not a URL: write https://host/path"),
        ('name = "x"\nurl = "https://a/ä"', "special characters as %xx"),
        ('name = "x"\nurl_from = "NONE"', "url_from NONE: the variable NONE is not set: set it where the workers"),
        ('name = "x"\nurl_from = "PAGER"', "url_from PAGER: it is not a URL"),
        ('name = "x"\nurl = "https://a"\nheaders_from = {A = "NONE"}', "headers_from: the variable NONE is not set"),
        ('name = "x"\nurl = "https://a"\nheaders_from = {A = "BAD"}', "the variable BAD has characters that are not"),
        ('name = "x"\nurl = "https://a"\nheaders_from = {Host = "PAGER"}', "'Host' cannot be set"),
        ('name = "x"\nurl = "https://a"\nheaders_from = {"A b" = "PAGER"}', "'A b' cannot be set"),
        ('name = "x"\ncommand = ["sh"]\nheaders_from = {A = "PAGER"}', "are for a URL"),
        ('name = "x"\nurl = "https://a"\nca_file = "/no/such.crt"', "ca_file: there is no file /no/such.crt"),
        ('name = "X y"\ncommand = ["sh"]', "receiver number 1: name is 'X y': use small letters"),
        ('command = ["sh"]', "receiver number 1: name is missing"),
        ('name = "x"\nurls = "https://a"', "receiver number 1: there is no setting 'urls'; there are name, kinds"),
        ('name = "x"\ncommand = ["sh"]\ndeadline_s = 0', "receiver number 1: deadline_s: Input should be greater"),
    ],
)
def test_an_invalid_receiver_is_refused(receiver: str, said: str) -> None:
    assert said in refusal(f"[[receiver]]\n{receiver}")


def test_a_password_in_a_url_is_refused() -> None:
    assert "it contains a user or a password" in refusal('[[receiver]]\nname = "x"\nurl = "https://me:s3cr3t@a/"')


def test_errors_of_the_file_itself_are_named() -> None:
    assert "it has no receiver" in refusal("")
    assert "there is no setting 'receivers'; there are receiver" in refusal("[[receivers]]")
    assert "two receivers are named 'x'" in refusal('[[receiver]]\nname = "x"\ncommand = ["sh"]\n' * 2)


def test_all_problems_are_reported_together() -> None:
    said = refusal('[[receiver]]\nname = "x"\nkinds = ["no"]\nurl = "http://a"\n[[receiver]]\nname = "y"\n')

    assert len(said.splitlines()) == 4
