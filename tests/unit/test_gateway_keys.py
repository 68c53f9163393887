"""Keys: their file, what each may ask for, and the law of an allowance."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdmesh.apikeys import SCOPES, ApiKey, Operator, entry_of, hash_key, parse_api_keys, parse_operators
from pdmesh.cli.app import app
from pdmesh.config import SecurityConfig
from pdmesh.errors import ConfigError, RequestRejected
from pdmesh.metrics import NO_SLO, Slo
from pdmesh_gateway.auth import Allowance, ApiKeys, Client


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def client(clock: Clock, **limits: float) -> Client:
    return Client(ApiKey(name="a", hash=hash_key("k"), **limits), clock)  # type: ignore[arg-type]


def test_keys_come_from_lines_and_setting(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n second \n")
    keys = ApiKeys(SecurityConfig(api_keys_file=path, api_key="third"))
    names = {keys.check(f"Bearer {key}").name for key in ("first", "second", "third")}
    assert len(names) == 3
    for header in (None, "", "first", "Basic first", "Bearer", "Bearer fourth", "Bearer # ours", "Bearer \udcff"):
        with pytest.raises(RequestRejected) as refused:
            keys.check(header)
        assert refused.value.status == 401
    assert not ApiKeys(SecurityConfig())
    assert ApiKeys(SecurityConfig()).check(None).name == ""


def test_a_file_without_keys_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# none\n")
    (tmp_path / "empty.toml").write_text("# none\n")
    for name in ("empty", "empty.toml", "missing"):
        with pytest.raises(ConfigError, match="api_keys_file"):
            ApiKeys(SecurityConfig(api_keys_file=tmp_path / name))


GOOD = f'[keys.a]\nhash = "{hash_key("k")}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not valid TOML"),
        ("[[[[", "not valid TOML"),
        ("x = 1", "may hold tables"),
        ("keys = 3", "may hold tables"),
        ("[keys.a]", "has no hash"),
        ('[keys.a]\nhash = "abc"', "64 hexadecimal"),
        ('[keys."a b"]\nhash = 1', "whose name has"),
        ("[keys]\na = 1", "an entry must be a table"),
        (GOOD + "colour = 1", "unknown setting colour"),
        (GOOD + 'scopes = ["fly"]', "must be a list of"),
        (GOOD + "requests_per_minute = 0", "at least 1"),
        (GOOD + "requests_per_minute = nan", "at least 1"),
        (GOOD + "tokens_per_minute = true", "at least 1"),
        (GOOD + "min_priority = 1.5", "whole number"),
        (GOOD + "min_priority = 2\nmax_priority = 1", "above max_priority"),
        (GOOD + "min_slo_ttft_ms = -1", "above 0"),
        (GOOD + "share = 0", "from 1 to 1000"),
        (GOOD + "share = 1.5", "from 1 to 1000"),
        (GOOD + GOOD.replace("keys.a", "keys.b"), "the same key"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as wrong:
        parse_api_keys(text, "FILE")
    assert "FILE" in str(wrong.value)


@given(
    scopes=st.frozensets(st.sampled_from(sorted(SCOPES))),
    requests_per_minute=st.none() | st.integers(1, 10**9) | st.floats(1, 1e9),
    min_priority=st.none() | st.integers(-9, 0),
    max_priority=st.none() | st.integers(0, 9),
    min_slo_ttft_ms=st.none() | st.floats(0.001, 1e6),
    share=st.integers(1, 1000),
)
def test_an_entry_is_read_back_as_it_was(**limits: object) -> None:
    key = ApiKey(name="a-1", hash=hash_key("k"), **limits)  # type: ignore[arg-type]
    assert parse_api_keys(entry_of(key), "FILE") == {"a-1": key}


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "keys.toml"
    path.write_text(GOOD + "requests_per_minute = 5\n")
    keys = ApiKeys(SecurityConfig(api_keys_file=path), clock)
    before = keys.check("Bearer k")
    with before.generating(num_choices=1, num_prompt_tokens=1):
        pass

    def rewrite(text: str) -> None:
        path.write_text(text)
        clock.now_s += 2

    rewrite("broken [")
    assert keys.check("Bearer k") is before  # a bad file changes nothing
    path.unlink()
    clock.now_s += 2
    assert keys.check("Bearer k") is before
    rewrite(f'{GOOD}max_priority = 3\n[keys.b]\nhash = "{hash_key("l")}"\n')
    assert keys.check("Bearer l").name == "b"
    assert keys.check("Bearer k") is before
    assert before.key.max_priority == 3
    rewrite(GOOD.replace(hash_key("k"), hash_key("m")))  # the key of one name was exchanged
    assert keys.check("Bearer m").name == "a"
    for gone in ("k", "l"):
        with pytest.raises(RequestRejected):
            keys.check(f"Bearer {gone}")


@pytest.mark.parametrize(("name", "first"), [("keys.toml", GOOD), ("keys", "k\n")])
def test_the_last_key_that_leaves_the_file_lets_nobody_in(tmp_path: Path, name: str, first: str) -> None:
    clock, path = Clock(), tmp_path / name
    path.write_text(first)
    keys = ApiKeys(SecurityConfig(api_keys_file=path), clock)
    assert keys.check("Bearer k").name
    path.write_text("# none\n")
    clock.now_s += 2
    for header in ("Bearer k", None):
        with pytest.raises(RequestRejected) as refused:
            keys.check(header)
        assert refused.value.status == 401
    assert keys, "a key is needed as before"
    path.write_text(first)
    clock.now_s += 2
    assert keys.check("Bearer k").name


def test_a_key_asks_only_for_what_it_may() -> None:
    one = client(Clock(), min_priority=0, max_priority=5, min_slo_ttft_ms=200)
    one.check_service_level(0, NO_SLO)
    one.check_service_level(5, Slo(ttft_s=0.2))
    for priority, slo, param in (
        (-1, NO_SLO, "priority"),
        (6, NO_SLO, "priority"),
        (0, Slo(ttft_s=0.001), "slo_ttft_ms"),
    ):
        with pytest.raises(RequestRejected) as refused:
            one.check_service_level(priority, slo)
        assert (refused.value.status, refused.value.param) == (400, param)


def test_a_keys_limits_hold_and_come_back() -> None:
    clock = Clock()
    one = client(clock, requests_per_minute=60, tokens_per_minute=600, max_concurrent_requests=3)

    def refused(num_choices: int = 1) -> float:
        with pytest.raises(RequestRejected) as error, one.generating(num_choices=num_choices, num_prompt_tokens=1):
            pass
        assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
        assert error.value.retry_after_s is not None
        return error.value.retry_after_s

    with one.generating(num_choices=2, num_prompt_tokens=10):
        refused(2)
    with one.generating(num_choices=3, num_prompt_tokens=10) as use_tokens:
        use_tokens(1000)  # more than there were: a debt
    wait_s = refused()
    clock.now_s += wait_s + 0.001
    with one.generating(num_choices=1, num_prompt_tokens=1):
        pass
    for _ in range(100):
        clock.now_s += 60
        for _ in range(60):
            with one.generating(num_choices=1, num_prompt_tokens=1):
                pass
        assert 0 < refused() <= 1


@given(st.floats(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20)), max_size=60))
def test_no_window_has_more_than_its_share_and_a_minutes(per_minute: float, steps: list[tuple[float, int]]) -> None:
    """Of units used one at a time: at most ``per_minute * (t / 60 + 1)`` within any t seconds."""
    clock = Clock()
    allowance = Allowance(per_minute, clock)
    used_at_s: list[float] = []
    for pause_s, num_tries in steps:
        clock.now_s += pause_s
        for _ in range(num_tries):
            if allowance.wait_s() == 0:
                allowance.use(1)
                used_at_s.append(clock.now_s)
    for i, first_s in enumerate(used_at_s):
        for j in range(i, len(used_at_s)):
            assert j - i + 1 <= per_minute * ((used_at_s[j] - first_s) / 60 + 1) + 1e-6


def test_the_command_makes_a_key_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    runner = CliRunner()
    secrets = []
    for name in ("alice", "bob"):
        done = runner.invoke(app, ["keys", "new", name, "--file", str(path), "--requests-per-minute", "60"])
        assert done.exit_code == 0, done.output
        secrets.append(done.stdout.strip().splitlines()[-1])
    assert path.stat().st_mode & 0o077 == 0
    assert not any(secret in path.read_text() for secret in secrets)
    keys = ApiKeys(SecurityConfig(api_keys_file=path))
    assert [keys.check(f"Bearer {secret}").name for secret in secrets] == ["alice", "bob"]
    assert keys.check(f"Bearer {secrets[0]}").key.requests_per_minute == 60
    for arguments in (["alice", "--file", str(path)], ["a b"], ["c", "--scope", "fly"], ["d", "--file", "keys.txt"]):
        refused = runner.invoke(app, ["keys", "new", *arguments])
        assert refused.exit_code == 2, refused.output


def test_who_watches_the_mesh_must_have_been_told_that_they_may() -> None:
    hashed = hash_key("secret")
    plain, watcher = (
        parse_api_keys(f'[keys.a]\nhash = "{hashed}"\n{scopes}', "here")["a"] for scopes in ("", 'scopes = ["watch"]')
    )
    assert "generate" in plain.scopes
    assert "watch" not in plain.scopes
    assert watcher.scopes == {"watch"}


OPERATOR = f'[operators.bob]\nhash = "{hash_key("t")}"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD, "may hold tables"),
        ("[operators.bob]", "has no hash"),
        (OPERATOR + 'scopes = ["generate"]', "must be a list of read, write"),
        (OPERATOR + "share = 2", "unknown setting share"),
        (OPERATOR + OPERATOR.replace("bob", "eve"), "the same token"),
    ],
)
def test_a_wrong_file_of_operators_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as wrong:
        parse_operators(text, "FILE")
    assert "\n" not in str(wrong.value)
    assert parse_operators(OPERATOR, "FILE") == {"bob": Operator(name="bob", hash=hash_key("t"))}


@pytest.mark.parametrize(("parse", "table"), [(parse_api_keys, "keys"), (parse_operators, "operators")])
def test_a_key_in_the_place_of_its_hash_is_not_repeated(parse: Callable[[str, str], object], table: str) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as wrong:
        parse(f'[{table}.bob]\nhash = "sk-pdmesh-secret"', "FILE")
    assert "secret" not in str(wrong.value), "it would be in a log"


def test_an_operators_token_is_made_with_its_entry(tmp_path: Path) -> None:
    file = tmp_path / "operators.toml"
    arguments = ["keys", "operator", "--file", str(file)]
    made = CliRunner().invoke(app, [*arguments, "bob", "--scope", "read", "--scope", "write"])
    assert made.exit_code == 0, made.output
    bob = parse_operators(file.read_text(), str(file))["bob"]
    assert bob == Operator(name="bob", hash=hash_key(made.stdout.splitlines()[-1]), scopes=frozenset(("read", "write")))
    assert CliRunner().invoke(app, [*arguments, "eve"]).exit_code == 0
    assert not parse_operators(file.read_text(), str(file))["eve"].may_write, "who is given no scope looks on"
    again = CliRunner().invoke(app, [*arguments, "bob"])
    assert (again.exit_code, "has an entry bob" in again.output) == (2, True)
