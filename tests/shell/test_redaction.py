"""Credentials leave no trace in a report, and everything else stays."""

import base64
import json
import pathlib
import signal
import string
import urllib.parse

import hypothesis
import hypothesis.strategies as st
import pytest

from mig_manager.cli.support_bundle import redaction

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

    clean = redaction.redact(text)

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

    data = json.loads(redaction.redact(text))

    assert data[name] == redaction.REMOVED
    assert json.loads(data["annotation"]) == {name: redaction.REMOVED}
    assert data["plain"] == 1
    assert redaction.redact(json.dumps({"other": [1]})) == '{"other": [1]}'


@hypothesis.given(
    end=st.sampled_from(
        ("token:", "secret: ", "password=", "a password ", "requirepass ", "sshpass -p ")
    ),
    name=NAMES,
    secret=BARE,
    separators=st.sampled_from([(",", ":"), (", ", ": ")]),
)
def test_json_stays_json_where_a_text_ends_like_the_name_of_a_secret(
    end: str, name: str, secret: str, separators: tuple[str, str]
) -> None:
    data = {
        "event": f"missing {end}",
        "level": "warning",
        "mixed": [end, 1, end, None, end, [1], end, [], end, {"nested": end}],
        f"key {end}": [[end], end],
        name: secret,
    }
    within = json.dumps(data, separators=separators)
    text = json.dumps(data | {"within": within, "next": within}, separators=separators)

    clean = json.loads(redaction.redact(text))

    expected = data | {name: redaction.REMOVED}
    assert json.loads(clean.pop("within")) == expected
    assert json.loads(clean.pop("next")) == expected
    assert clean == expected


@hypothesis.given(secret=PHRASES, before=st.text(), after=st.text())
def test_a_known_secret_is_removed_wherever_it_is(secret: str, before: str, after: str) -> None:
    text = f"{before}{secret}{after} {json.dumps(secret)}"

    assert secret not in redaction.redact(text, [secret]).replace(redaction.REMOVED, "")


@hypothesis.given(secret=PHRASES, rest=PHRASES, is_reversed=st.booleans())
def test_a_secret_that_begins_with_another_is_removed_whole(
    secret: str, rest: str, *, is_reversed: bool
) -> None:
    secrets = sorted([secret, secret + rest], key=len, reverse=is_reversed)

    assert redaction.redact(secret + rest, secrets) == redaction.REMOVED


@hypothesis.given(name=NAMES, secrets=st.lists(st.text(), min_size=1), inner=BARE)
def test_json_stays_json_where_secrets_are_in_a_list(
    name: str, secrets: list[str], inner: str
) -> None:
    text = json.dumps({name: secrets, "annotation": json.dumps({name: [inner, inner]})})

    data = json.loads(redaction.redact(text))

    assert data.keys() == {name, "annotation"}
    assert json.loads(data["annotation"]) == {name: redaction.REMOVED}


@hypothesis.given(secret=PHRASES, value=st.sampled_from(("base64", "URL")))
def test_a_known_secret_is_removed_also_where_it_is_encoded(secret: str, value: str) -> None:
    encoded = {
        "base64": base64.b64encode(secret.encode()).decode(),
        "URL": urllib.parse.quote(secret, safe=""),
    }[value]

    clean = redaction.redact(f"x {encoded}", [secret])

    assert encoded.rstrip("=") not in clean


@pytest.mark.parametrize("value", [True, None, 12345678])
def test_json_stays_json_if_a_secret_is_not_a_string(value: object) -> None:
    clean = redaction.redact(json.dumps({"has_token": value, "next": 1}))

    assert json.loads(clean) == {"has_token": redaction.REMOVED, "next": 1}
    listed = redaction.redact(json.dumps([{"name": "A_TOKEN", "value": value}, 1]))
    assert json.loads(listed) == [{"name": "A_TOKEN", "value": redaction.REMOVED}, 1]


@pytest.mark.parametrize("end", ["\n-----END PRIVATE KEY-----\n", ""])
def test_a_key_in_pem_is_removed_also_if_its_end_is_missing(end: str) -> None:
    text = f"x\n-----BEGIN PRIVATE KEY-----\nMIIEvQ+/\nIBADANB==\n{end}"

    clean = redaction.redact(text)

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
    [
        ("", "eyJ-"),
        ('token:\\"', "\\"),
        ('token:"', "} "),
        ('token:"', ",[ "),
        pytest.param("", "login ", marks=pytest.mark.slow),
        pytest.param("", "token", marks=pytest.mark.slow),
        pytest.param("", "sk-", marks=pytest.mark.slow),
    ],
)
def test_hostile_text_does_not_keep_the_command_busy(begin: str, repeated: str) -> None:
    """The limit is of the processor's time, and many times what it takes."""

    def interrupt(*_: object) -> None:
        raise TimeoutError

    text = begin + repeated * (300_000 // len(repeated))
    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, 15)
    try:
        assert redaction.redact(text) in (text, f'token:\\"{redaction.REMOVED}\\"')
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# -- secrets where reports have them ----------------------------------------------------------

HIDDEN = "hunter2"  # in texts whose credential has a name; others are credentials by their looks
_LETTERS = string.ascii_letters + string.digits


def _looks(prefix: str, length: int, letters: str = _LETTERS) -> str:
    """Return a credential that is recognised by its prefix, and that no service has issued."""
    return prefix + "".join(letters[(7 * i + 3) % len(letters)] for i in range(length))


_HEX = "0123456789abcdef"
_UPPER = string.ascii_uppercase + "234567"

NAMED = (
    # Variables and settings.
    "DB_PASSWORD=hunter2",
    "export PGPASSWORD='hunter2 and more'; psql",
    "MYSQL_PWD=hunter2 mysqldump all",
    "SSHPASS=hunter2 sshpass -e ssh node",
    "DBPASS=hunter2",
    'DBPASS=",4],:hunter2"',
    "WANDB_API_KEY=hunter2",
    "NGC_CLI_API_KEY: hunter2",
    "apiKey: hunter2",
    "dbPassword = 'it''s hunter2'",
    "spring.datasource.password=hunter2",
    "client_secret=hunter2&grant_type=client_credentials",
    "bindpw hunter2",
    "requirepass hunter2",
    "machine example.com login me password hunter2",
    "//registry.example.com/:_authToken=hunter2",
    "Server=db;User Id=me;Password=hunter2;Encrypt=true",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2/+==;EndpointSuffix=x",
    # YAML and JSON.
    'password: "the first line\n  and hunter2"',
    "password: 'the first line\n\n  and hunter2'",
    "password: the first line\n  and hunter2",
    "password:\n  hunter2",
    "passwords:\n- one\n- hunter2",
    "passwords:\n  - hunter2\nnext: 1",
    "- name: DB_PASSWORD\n  value: 'more and hunter2'",
    '{"args":["--token","hunter2"]}',
    '{"args": ["login", "-p", "hunter2"], "command": ["docker"]}',
    '{"command":["sshpass","-p","hunter2","ssh","node"]}',
    '{"password": ["one", "hunter2"]}',
    "{'password': 'it\\'s hunter2', 'next': 1}",
    '{"data": "{\\"client_secret\\": \\"hunter2\\"}"}',
    "map[Authorization:[Bearer hunter2] Accept:[*/*]]",
    # Headers.
    "Proxy-Authorization: Basic hunter2==",
    "curl -H 'X-Api-Key: hunter2' https://example.com",
    'curl -H "X-Vault-Token: hunter2" https://example.com',
    "Set-Cookie: session=hunter2; Path=/; HttpOnly",
    "authorization: AWS4-HMAC-SHA256 Credential=AK/x/y, SignedHeaders=host, Signature=hunter2",
    # Command lines.
    "curl -u 'me:the hunter2' https://example.com",
    'curl -u "me:hunter2" https://example.com',
    "curl -ume:hunter2 https://example.com",
    "curl --user=me:hunter2 https://example.com",
    "curl --proxy-user me:hunter2 https://example.com",
    "wget --http-password=hunter2 https://example.com",
    "sshpass -p hunter2 ssh node",
    "sshpass -phunter2 ssh node",
    "sshpass -p 'the hunter2' ssh node",
    "mysql -h db -u root -phunter2 app",
    "docker login -u me -p hunter2 registry.example.com",
    "helm registry login example.com --username me --password hunter2",
    "redis-cli -h db -a hunter2 ping",
    "ldapsearch -x -D cn=admin -w hunter2 -b dc=x",
    "openssl rsa -in k.pem -passin pass:hunter2",
    "smbclient //host/share -U me%hunter2",
    "kubeadm join 10.0.0.1:6443 --token hunter2.0123456789abcdef",
    "mount -t cifs -o username=me,password=hunter2,vers=3 //host/share /mnt",
    # Addresses.
    "https://me:hunter2@example.com/x",
    "https://me:p@ss@hunter2@example.com/x",
    "https://me:hunter2@sha.example.com/x",
    "postgres://me:hunter2@db:5432/app?sslmode=require",
    "redis://:hunter2@db:6379/0",
    "mongodb+srv://me:hunter2@db.example.com/?retryWrites=true",
    "jdbc:postgresql://db/app?user=me&password=hunter2",
    "https://example.com/x?access_token=hunter2&page=2",
    "https://a.blob.example.com/c?sv=2024&sig=hunter2%3D",
    "https://hunter2@sentry.example.com/4",
    # Sentences.
    "login failed with password 'hunter2'",
    "the password is hunter2",
)

LOOKS = (
    ("token for the model: ", _looks("hf_", 34)),
    ("pull with ", _looks("nvapi-", 64)),
    ("signed with key ", _looks("AKIA", 16, _UPPER)),
    ("assumed role, key ", _looks("ASIA", 16, _UPPER)),
    ("cloned with ", _looks("ghp_", 36)),
    ("cloned with ", _looks("github_pat_", 22)),
    ("runner ", _looks("glrt-", 20)),
    ("registry ", _looks("glpat-", 20)),
    ("bot ", _looks("xoxb-", 40)),
    ("app ", _looks("xapp-1-", 40)),
    ("posted to https://hooks.slack.com/services/", "T0000/B0000/" + _looks("", 24)),
    ("maps ", _looks("AIza", 35)),
    ("oauth ", _looks("ya29.", 60)),
    ("paid with ", _looks("sk_live_", 24)),
    ("asked with ", _looks("sk-proj-", 48)),
    ("asked with ", _looks("sk-ant-api03-", 48)),
    ("asked with ", _looks("sk-", 48)),
    ("published with ", _looks("npm_", 36)),
    ("published with ", _looks("pypi-AgEIcHlwaS5vcmc", 60)),
    ("pulled with ", _looks("dckr_pat_", 27)),
    ("droplet ", _looks("dop_v1_", 64, _HEX)),
    ("vault ", _looks("hvs.", 24)),
    ("query ", _looks("dapi", 32, _HEX)),
    ("mail ", _looks("SG.", 22) + "." + _looks("", 43)),
    ("panel ", _looks("glsa_", 32)),
    ("decrypt with ", _looks("AGE-SECRET-KEY-1", 58, _UPPER)),
    ("sent ", "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"),
)

HARMLESS = (
    # What a report is about.
    "https://example.com:8080/path?x=1 registry.example.com/mig-manager@sha256:0123",
    "docker-pullable://example.com:5000/mig-manager@sha256:0123 docker://nginx@sha256:0123",
    "GPU-0a1b2c3d-1111-2222-3333-444455556666",
    "MIG-0a1b2c3d-1111-5222-8333-444455556666 1g.5gb at 0",
    "MIG-GPU-0a1b2c3d-1111-2222-3333-444455556666/7/0",
    "nvidia.com/mig.config=all-1g.5gb nvidia.com/mig.config.state=success",
    "layout all-balanced: 2x 1g.5gb, 2g.10gb, 3g.20gb, 1c.3g.20gb+me",
    'mig-manager.io/status: {"configHash": "0f1e2d3c4b5a69788796a5b4c3d2e1f0"}',
    "GPU 0 at 00000000:3B:00.0 (0x20B010DE), driver 580.65.06, CUDA 13.0",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.",
    '{"nvidia.com/mig-1g.5gb": "7", "nvidia.com/gpu": "0"}',
    "node/n1 failed (DrainTimeout): pod team/train-0 did not end; budget team/keep-large",
    '{"event": "drain_begins", "pods": ["ml/train-0"], "level": "info", "attempt": 3}',
    "2026-11-23T22:08:58.123456Z [info     ] layout_requested  node=n1 why='room for 1 pod'",
    "nvidia.com/gpu.deploy.device-plugin: paused-for-mig-change",
    "mig-manager status -w --simulate 8xA100-SXM4-40GB",
    "NVIDIA_MIG_CONFIG_DEVICES=all NVIDIA_VISIBLE_DEVICES=all",
    # Kubernetes.
    "automountServiceAccountToken: false",
    '{"automountServiceAccountToken": false}',
    "secretName: mig-manager-tls",
    "valueFrom:\n  secretKeyRef:\n    name: creds\n    key: value\n",
    "imagePullSecrets:\n- name: registry\n",
    '{"imagePullSecrets": [{"name": "registry"}]}',
    "- serviceAccountToken:\n    expirationSeconds: 3607\n    path: token\n",
    '{"projected": {"sources": [{"serviceAccountToken": {"path": "x"}}]}}',
    "tokenExpirationSeconds: 3600",
    'secrets is forbidden: User "system:serviceaccount:a:b" cannot list resource "secrets"',
    'MountVolume.SetUp failed for volume "x": secret "creds" not found',
    "key: nvidia.com/gpu\noperator: Exists\neffect: NoSchedule\n",
    "topologyKey: kubernetes.io/hostname",
    "pod-template-hash: 7d9f8c6b5d",
    "uid: 0a1b2c3d-1111-2222-3333-444455556666 resourceVersion: 123456789",
    "image: nvcr.io/nvidia/k8s-device-plugin:v0.19.0",
    "registry.example.com:5000/mig-manager@sha256:" + 64 * "a",
    "docker-pullable://registry.example.com:5000/mig-manager@sha256:" + 64 * "b",
    "containerd://" + 64 * "c",
    "kube-apiserver --authorization-mode=Node,RBAC --tls-private-key-file=/etc/k/tls.key",
    "discovered 10.0.0.1:6443, fd00::1, node-1.example.com:10250",
    "Warning  FailedScheduling  0/3 nodes are available: 3 Insufficient nvidia.com/mig-1g.5gb.",
    "POD_NAME=agent-x NODE_NAME=n1 HOME=/root PATH=/usr/bin:/bin PWD_HISTORY_SIZE",
    "kubeconfig: /root/.kube/config",
    # Commands and addresses.
    "https://example.com/@me/post?x=1#part",
    "http://[::1]:9400/metrics",
    "git@github.com:nvidia/mig-parted.git",
    "mail me@example.com",
    "journalctl -u mig-manager.service --since 10:00",
    "docker run -u 1000:1000 --gpus all image",
    "mkdir -p /var/lib/mig-manager",
    "ssh -p 2222 node; nc -w 3 host 22; ls -a",
    "mysql -h db --port=3306",
    "curl -fsSL https://example.com/install.sh",
    "commit 4e80221d0c9a3f5b7e6d8c1a2b3f4e5d6c7b8a90",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "md5 d41d8cd98f00b204e9800998ecf8427e",
    "serial 1320221012345, board 900-21001-0000-000, VBIOS 92.00.19.00.10",
    # Words like those of credentials.
    "author: me, passed: 3, bypass=1, compass: n, signal: 15, authentic=1",
    "BYPASS=1 COMPASS=n",
    "tokenizer: llama-3, max_tokens: 4096, --max-tokens 4096",
    "from huggingface_hub import hf_hub_download",
    "npm_config_registry=https://registry.example.com npm_package_version=1.2.3",
    "pip install scikit-learn sk-learn-extra pypi-mirror",
    "keyring monkey=1 turkey: x",
    "PASSWORD_FILE=/run/secrets/db TOKEN_PATH=/var/run/token",
    "the token is expired; the password is wrong",
    "SG.1 and sk-1 and AKIA and eyJ",
    "dapi-server xoxo ya29 AIza hvs.x",
)


def test_a_named_credential_is_removed() -> None:
    for text in NAMED:
        clean = redaction.redact(f"before\n{text}\nafter: 1")

        assert HIDDEN not in clean
        assert redaction.REMOVED in clean
        assert (clean[:7], clean[-9:]) == ("before\n", "\nafter: 1")
        if text.startswith('{"'):
            assert set(json.loads(clean.splitlines()[1])) == set(json.loads(text))


def test_a_credential_without_a_name_is_removed_by_its_form() -> None:
    clean = [redaction.redact(f"{before}{credential}, then") for before, credential in LOOKS]

    assert clean == [f"{before}[removed], then" for before, _ in LOOKS]


def test_text_without_secrets_is_unchanged() -> None:
    assert [redaction.redact(text) for text in HARMLESS] == [*HARMLESS]


def test_redaction_leaves_the_projects_pages_unchanged() -> None:
    """Layouts, reasons, metrics and labels are not taken for credentials."""
    pages = pathlib.Path(__file__).parents[2] / "docs"
    texts = [page.read_text() for page in (pages / "labels.md", pages / "reasons.md")]

    assert [redaction.redact(text) for text in texts] == texts
