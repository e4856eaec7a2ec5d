"""Credentials leave no trace in a report, and everything else stays."""

import base64
import json
import signal
import urllib.parse

import hypothesis
import hypothesis.strategies as st
import pytest

from mig_manager.cli.commands import redaction

BARE = st.text(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=_~.-", min_size=8
).filter(lambda text: text[0].isalnum())
PHRASES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=8)
NAMES = st.sampled_from(
    ("token", "PASSWORD", "passwd", "client-key-data", "aws_secret_access_key", "api-key")
)
FORMS = (
    "Authorization: Bearer {}",
    "Authorization: Basic {}",
    "curl -H 'authorization: bearer {}' https://example.com",
    "    client-certificate-data: {}\n",
    "Authorization: Token {}",
    "tool --api-token {} --other",
    "token: |\n  {0}\n\n  {0}",
    "password: >-\n    {}",
    '{{"name": "API_TOKEN", "value": "{}"}}',
    '{{"auths": {{"example.com": {{"auth": "{}"}}}}}}',
    "mysql pwd={} other",
    "Cookie: session={}; csrf={}; theme=dark",
    "curl -H 'cookie: session={}; other={}' -u user:{} https://example.com",
    "('Authorization', '{}')",
    "# password: correct horse {}",
    "password=a,{}",
    "https://example.com/x?X-Amz-Signature={}&other=1",
    '"PASSWORDS": ["{}", "{}"]',
    "LS0tLS1CRUdJTi{}",
    '"env": "{{\\"name\\":\\"API_TOKEN\\",\\"value\\":\\"{}\\"}}"',
)


@pytest.mark.parametrize("form", FORMS)
@hypothesis.given(secret=BARE)
def test_a_credential_in_a_usual_form_is_removed_and_the_rest_stays(
    form: str, secret: str
) -> None:
    secret += "SECRET"
    text = f"before\n{form.format(*[secret] * 3)}\nafter"

    clean = redaction.redacted(text)

    assert secret not in clean
    assert clean.startswith("before\n")
    assert clean.endswith("\nafter")
    assert redaction.REMOVED in clean


@hypothesis.given(
    name=NAMES, secret=PHRASES, inner=BARE, separators=st.sampled_from([(",", ":"), (", ", ": ")])
)
def test_json_stays_json_and_loses_its_secrets_also_inside_a_text(
    name: str, secret: str, inner: str, separators: tuple[str, str]
) -> None:
    annotation = json.dumps({name: inner}, separators=separators)
    text = json.dumps({"plain": 1, name: secret, "annotation": annotation}, separators=separators)

    data = json.loads(redaction.redacted(text))

    assert data[name] == redaction.REMOVED
    assert json.loads(data["annotation"]) == {name: redaction.REMOVED}
    assert data["plain"] == 1
    assert redaction.redacted(json.dumps({"other": [1]})) == '{"other": [1]}'


@hypothesis.given(secret=PHRASES, before=st.text(), after=st.text())
def test_a_known_secret_is_removed_wherever_it_is(secret: str, before: str, after: str) -> None:
    text = f"{before}{secret}{after} {json.dumps(secret)}"

    assert secret not in redaction.redacted(text, [secret]).replace(redaction.REMOVED, "")


@hypothesis.given(name=NAMES, secrets=st.lists(st.text(), min_size=1), inner=BARE)
def test_json_stays_json_where_secrets_are_in_a_list(
    name: str, secrets: list[str], inner: str
) -> None:
    text = json.dumps({name: secrets, "annotation": json.dumps({name: [inner, inner]})})

    data = json.loads(redaction.redacted(text))

    assert data.keys() == {name, "annotation"}
    assert json.loads(data["annotation"]) == {name: redaction.REMOVED}


@hypothesis.given(secret=PHRASES, value=st.sampled_from(("base64", "URL")))
def test_a_known_secret_is_removed_also_where_it_is_encoded(secret: str, value: str) -> None:
    encoded = {
        "base64": base64.b64encode(secret.encode()).decode(),
        "URL": urllib.parse.quote(secret, safe=""),
    }[value]

    clean = redaction.redacted(f"x {encoded}", [secret])

    assert encoded.rstrip("=") not in clean


@pytest.mark.parametrize("value", [True, None, 12345678])
def test_json_stays_json_where_a_secret_is_no_text(value: object) -> None:
    clean = redaction.redacted(json.dumps({"has_token": value, "next": 1}))

    assert json.loads(clean) == {"has_token": redaction.REMOVED, "next": 1}
    listed = redaction.redacted(json.dumps([{"name": "A_TOKEN", "value": value}, 1]))
    assert json.loads(listed) == [{"name": "A_TOKEN", "value": redaction.REMOVED}, 1]


@pytest.mark.parametrize("end", ["\n-----END PRIVATE KEY-----\n", ""])
def test_a_key_in_pem_is_removed_also_if_its_end_is_missing(end: str) -> None:
    text = f"x\n-----BEGIN PRIVATE KEY-----\nMIIEvQ+/\nIBADANB==\n{end}"

    clean = redaction.redacted(text)

    assert clean.startswith("x\n[removed]")
    assert "MIIE" not in clean
    assert "ANB" not in clean


def test_the_secrets_of_a_kubeconfig_are_found_and_its_names_are_not() -> None:
    text = """\
    users:
    - name: me
      user: {token: abcdef, client-key-data: "Zm9v"}
      password: 'a b'
    """

    assert sorted(redaction.values(text)) == ["Zm9v", "a b", "abcdef"]


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("GITHUB_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("DB_PWD", True),
        ("NODE_NAME", False),
        ("PWD", False),
    ],
)
def test_a_variable_is_a_secret_by_its_name(name: str, *, is_secret: bool) -> None:
    assert redaction.is_secret(name) is is_secret


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [("", "eyJ-"), ('token:\\"', "\\"), ("", "login "), ("", "token"), ("", "sk-")],
)
def test_hostile_text_does_not_keep_the_command_busy(begin: str, repeated: str) -> None:
    """The limit is of the processor's time, and many times what it takes."""

    def interrupt(*_: object) -> None:
        raise TimeoutError

    text = begin + repeated * (300_000 // len(repeated))
    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, 15)
    try:
        assert redaction.redacted(text) in (text, f'token:\\"{redaction.REMOVED}\\"')
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
