"""The files of deploy/ and docs/deploy.md: they fit together, the server's options and its metrics."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from test_server_harness import wait_until
from test_server_metrics import PARTS, Page, all_metrics, parse

from deltic.cli import command_parser
from deltic.cli.options import engine_options, words_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
FILES = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                       capture_output=True, text=True).stdout.splitlines()
SERVED = {"/health", "/ready", "/metrics"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
DRAIN = command_parser("serve").parse_mixed([]).drain_seconds
"""Default seconds that running answers have after SIGTERM."""
Step = tuple[str, str]


def loaded(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def stages() -> list[list[Step]]:
    """The instructions of each stage of the Containerfile, without comments."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Containerfile").read_text(encoding="utf-8"), flags=re.M)
    steps = [(name, rest) for name, rest in re.findall(r"^([A-Z]+) +(.*)$", text.replace("\\\n", " "), re.M)]
    starts = [index for index, (name, _) in enumerate(steps) if name == "FROM"]
    assert starts[0] == 0
    return [steps[start:end] for start, end in zip(starts, [*starts[1:], len(steps)])]


BUILD, FINAL = stages()


def only(steps: list[Step], name: str) -> str:
    [found] = [rest for given, rest in steps if given == name]
    return found


def environment() -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", only(FINAL, "ENV")))


def sent(path: str) -> bool:
    """True if .dockerignore lets a file into the build context: the last line that matches it or a folder decides."""
    allowed = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern, folders = line.removeprefix("!").removeprefix("**/"), [*Path(path).parents][:-1]
        names = [path, *map(str, folders)]
        if "**/" in line:
            names = [Path(name).name for name in names]
        if line and not line.startswith("#") and any(fnmatch(name, pattern) for name in names):
            allowed = line.startswith("!")
    return allowed


def served_by(words: list[str]) -> Any:
    """Parses arguments of `deltic serve`."""
    return command_parser("serve").parse_mixed(words)


# Container


def test_the_build_context_has_the_copied_files_and_nothing_else() -> None:
    copied = [words[:-1] for name, rest in BUILD if name == "COPY" for words in [shlex.split(rest)]]
    sources = {source for words in copied for source in words}
    tracked = {path for path in FILES if path in sources or path.partition("/")[0] in sources}
    assert {path.partition("/")[0] for path in tracked} == sources
    assert {path for path in FILES if sent(path)} == tracked
    unsent = ("deploy/secrets/api_key", ".git/config", ".venv/bin/python", "deltic/ops/cpu/libdeltic.so",
              "deltic/ops/cpu/deltic.h", "deltic/cli/__pycache__/serve.pyc", "model.gguf")
    assert not [path for path in unsent if sent(path)]


def test_the_build_has_what_the_package_needs() -> None:
    sources = {source for name, rest in BUILD if name == "COPY" for source in shlex.split(rest)[:-1]}
    packages = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {PROJECT["readme"], *packages, "csrc", "hatch_build.py", "pyproject.toml", "constraints.txt"}
    assert needed <= sources


def test_run_steps_are_valid() -> None:
    steps = [rest for name, rest in BUILD + FINAL if name == "RUN"]
    known = {"apt-get", "rm", "python", "ls", "useradd", "install"}
    for step in steps:
        subprocess.run(["sh", "-n", "-c", step], check=True)
        commands = {part.split()[0] for part in re.split(r"&& !|&&", step)}
        assert commands <= known, step
    assert len(steps) == 5
    paths = {word for step in steps for word in re.findall(r"/opt/\w+", step)}
    assert paths == {"/opt/deltic"} == {rest.split()[1] for name, rest in FINAL if name == "COPY"}


def test_both_stages_have_a_python_that_the_package_supports() -> None:
    [image] = {only(stage, "FROM").removesuffix(" AS build") for stage in (BUILD, FINAL)}
    version = image.removeprefix("docker.io/library/python:").removesuffix("-slim-bookworm")
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)


def test_extras_exist() -> None:
    texts = (DEPLOY / "Containerfile").read_text(encoding="utf-8") + PAGE
    named = re.findall(r"(?:EXTRAS=|dependencies[\w .]*, such as `?)([a-z,]+)", texts)
    assert len(named) == 2
    assert {name for names in named for name in names.split(",")} == {"cluster", "states", "video"} <= {
        *PROJECT["optional-dependencies"]}


def test_the_container_serves_as_its_files_say() -> None:
    args = served_by([*json.loads(only(FINAL, "ENTRYPOINT")), *json.loads(only(FINAL, "CMD"))][2:])
    assert args.model == "tiny" and args.host == "0.0.0.0" and args.port is None
    assert only(FINAL, "EXPOSE") == "8000"
    volumes = json.loads(only(FINAL, "VOLUME"))
    kept, state = environment(), engine_options(args)["cache_dir"]
    assert volumes == ["/models", state] and state in only(FINAL, "RUN")
    assert kept["HF_HOME"].startswith("/models/") and kept["XDG_CACHE_HOME"].startswith(f"{state}/")
    user, check = only(FINAL, "USER"), only(FINAL, "HEALTHCHECK")
    assert user.partition(":")[0] in only(FINAL, "RUN").split() and user.split(":")[0] != "0"
    assert {*re.findall(r":8000(/\w+)", check)} < SERVED


# Compose


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Source by target."""
    return {target: source for source, target, *_ in (mount.split(":") for mount in service["volumes"])}


def test_compose_files_fit_together() -> None:
    compose = loaded("compose.yaml")
    services = compose["services"]
    for service in services.values():
        for source in mounts(service).values():
            assert source in compose["volumes"] or (source.startswith("./") and (DEPLOY / source).is_file())
        assert {*service.get("secrets", ())} <= {*compose["secrets"]}
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    build = services["deltic"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    assert {*mounts(services["deltic"])} >= {*json.loads(only(FINAL, "VOLUME"))}
    cuda = loaded("compose.cuda.yaml")["services"]
    assert {*cuda} <= {*services} and {*cuda["deltic"]["build"]["args"]} <= {rest.split("=")[0] for name, rest in BUILD
                                                                               if name == "ARG"}
    for secret in compose["secrets"].values():
        assert secret["file"].startswith("secrets/") and f"deploy/{secret['file']}" in PAGE
        ignored = subprocess.run(["git", "check-ignore", f"deploy/{secret['file']}"], cwd=ROOT, capture_output=True)
        assert ignored.returncode == 0


def test_compose_gives_the_server_valid_options(tmp_path: Path) -> None:
    service = loaded("compose.yaml")["services"]["deltic"]
    assert mounts(service)[service["command"][1]] == "./deltic.yaml" and service["command"][0] == "--config"
    options = loaded("deltic.yaml")
    assert options["api-key-file"] == f"/run/secrets/{service['secrets'][0]}"
    options["api-key-file"] = str(tmp_path / "key")
    (tmp_path / "key").touch()
    entry = json.loads(only(FINAL, "ENTRYPOINT"))[2:]
    args = served_by([*words_of(command_parser("serve"), "deltic.yaml", options), *entry])
    assert args.model == "tiny" and engine_options(args)["cache_disk_gb"] == 20
    assert seconds(service["stop_grace_period"]) >= DRAIN + 60


def test_prometheus_and_grafana_find_their_files() -> None:
    services, config = loaded("compose.yaml")["services"], loaded("prometheus.yaml")
    prometheus, grafana = mounts(services["prometheus"]), mounts(services["grafana"])
    assert prometheus["/etc/prometheus/prometheus.yml"] == "./prometheus.yaml"
    assert [prometheus[f"/etc/prometheus/{name}"] for name in config["rule_files"]] == ["./alerts.yaml"]
    [scrape] = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["deltic:8000"]}] and "deltic" in services
    assert scrape["authorization"] == {"credentials_file": loaded("deltic.yaml")["api-key-file"]}
    assert "api_key" in services["prometheus"]["secrets"]
    [provider] = loaded("grafana/provider.yaml")["providers"]
    assert grafana[f"{provider['options']['path']}/deltic.json"] == "./grafana/dashboard.json"
    assert grafana["/etc/grafana/provisioning/dashboards/deltic.yaml"] == "./grafana/provider.yaml"
    assert grafana["/etc/grafana/provisioning/datasources/deltic.yaml"] == "./grafana/datasource.yaml"
    [source] = loaded("grafana/datasource.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"


def seconds(duration: str) -> float:
    amount, unit = re.fullmatch(r"(\d+)([sm]?)", duration).groups()  # type: ignore[union-attr]
    return float(amount) * {"m": 60, "s": 1, "": 1}[unit]


# systemd


def unit() -> dict[str, list[str]]:
    """Values by key."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", (DEPLOY / "deltic.service").read_text(encoding="utf-8"), re.M):
        found.setdefault(key, []).append(value)
    return found


def test_the_systemd_unit_starts_the_server() -> None:
    [command], [stop] = unit()["ExecStart"], unit()["TimeoutStopSec"]
    [given] = re.findall(r'^DELTIC_OPTIONS="(.*)"$', (DEPLOY / "deltic.env").read_text(encoding="utf-8"), re.M)
    program, name, *words = command.replace("%S", "/var/lib").replace("$DELTIC_OPTIONS", given).split()
    args = served_by(words)
    assert (program, name) == ("/opt/deltic/bin/deltic", "serve") and f"{program.rpartition('/')[0]}/pip" in PAGE
    assert args.model == "tiny" and args.host is None
    assert engine_options(args)["cache_dir"] == f"/var/lib/{unit()['StateDirectory'][0]}"
    assert seconds(stop) >= DRAIN + 60
    assert unit()["EnvironmentFile"] == ["/etc/deltic.env"] and unit()["DynamicUser"] == ["yes"]
    assert all(len(values) == 1 for values in unit().values())


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "deltic.service").read_text(encoding="utf-8")
    place = tmp_path / "deltic.service"

    def complaints(text: str) -> str:
        place.write_text(text.replace("/opt/deltic/bin/deltic", "/bin/true"), encoding="utf-8")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(place)],
                              capture_output=True, text=True)
        return "".join(line for line in done.stderr.splitlines(True) if place.name in line)

    assert complaints(text) == ""
    assert "RestartSecs" in complaints(text.replace("RestartSec=", "RestartSecs="))


# Metrics


SELECTOR = re.compile(r"(?P<before>\w*)(?P<open>\(?)(?P<name>deltic_\w+)(?P<labels>\{[^}]*\})?(?P<range>\[[^]]*\])?")
ADDED = {"instance", "job"}
"""Labels that Prometheus adds."""


def check_query(query: str, metrics: Page) -> None:
    """Asserts that a PromQL expression reads exported metrics by labels that they have, counters as rates."""
    bare = re.sub(r'"[^"]*"', '""', query)
    assert all(bare.count(left) == bare.count(right) for left, right in ("()", "[]", "{}")), query
    selectors = [*SELECTOR.finditer(query)]
    known = set(ADDED)
    for found in selectors:
        names = {family + part: kind for family, kind in metrics.kinds.items() for part in PARTS[kind]}
        kind = names[found["name"]]
        labels = {label for (name, given), _ in metrics.samples.items() if name == found["name"] for label, _ in given}
        assert {*re.findall(r'(\w+)=?[=~!]"', found["labels"] or "")} <= labels | ADDED, query
        assert (found["before"] == "rate") == bool(found["range"]) == (kind != "gauge"), query
        known |= labels
    for group in re.findall(r"\b(?:by|without) \(([^)]*)\)", query):
        assert {*re.findall(r"\w+", group)} <= known, query
    if "histogram_quantile" in query:
        assert all(found["name"].endswith("_bucket") for found in selectors), query
        assert all("le" in group for group in re.findall(r"by \(([^)]*)\)", query)), query


def panels() -> list[dict[str, Any]]:
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    return list(board["panels"])


def rules() -> list[dict[str, Any]]:
    [group] = loaded("alerts.yaml")["groups"]
    return list(group["rules"])


def test_dashboard_reads_exported_metrics() -> None:
    metrics, queries = all_metrics(), [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(queries) > 30
    for query in queries:
        assert "deltic_" in query
        check_query(query, metrics)
    board = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    for variable in board["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore
        check_query(f"sum by ({label}) ({name})", metrics)


def test_panels_stand_side_by_side() -> None:
    assert [panel["id"] for panel in panels()] == [*range(1, len(panels()) + 1)]
    taken = [(x, y) for panel in panels() for place in [panel["gridPos"]]
             for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(taken) == len({*taken}) and max(x for x, _ in taken) < 24
    for panel in panels():
        references = [target["refId"] for target in panel["targets"]]
        assert references == [*"ABC"][:len(references)]


def test_alerts_read_exported_metrics() -> None:
    metrics = all_metrics()
    for rule in rules():
        assert {*rule} == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical") and {*rule["annotations"]} == {"summary", "action"}
        assert "deltic" in rule["expr"] and re.fullmatch(r"\d+m", rule["for"])
        check_query(rule["expr"], metrics)
        used = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
        assert used <= {"instance", "model"} and ("model" not in used or "http_responses" not in rule["expr"])
    jobs = {name for rule in rules() for name in re.findall(r'job="(\w+)"', rule["expr"])}
    assert jobs == {scrape["job_name"] for scrape in loaded("prometheus.yaml")["scrape_configs"]}
    [(name, above)] = [found for rule in rules() for found in re.findall(
        r"histogram_quantile\(0.95, rate\((\w+)\[.*\]\)\) > (\d+)", rule["expr"])]
    bounds = [float(dict(labels)["le"]) for (given, labels) in metrics.samples if given == name]
    assert sorted(bounds)[-2] > float(above), "a quantile is never above the last finite bound"


WRONG = {
    "a name": "deltic_requests_runing",
    "a part of no histogram": "rate(deltic_steps_total_bucket[5m])",
    "a label": 'deltic_requests_running{tier="host"}',
    "a counter as it is": "deltic_steps_total",
    "the rate of a gauge": "rate(deltic_requests_running[5m])",
    "a group": "sum by (tier) (deltic_requests_running)",
    "a parenthesis": "sum(deltic_requests_running",
    "a quantile without buckets": "histogram_quantile(0.5, rate(deltic_queue_time_seconds_sum[5m]))",
    "a quantile without le": "histogram_quantile(0.5, sum by (model) (rate(deltic_queue_time_seconds_bucket[5m])))",
}


@pytest.mark.parametrize("query", WRONG.values(), ids=WRONG)
def test_wrong_queries_are_noticed(query: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check_query(query, all_metrics())


# The page


def test_the_page_names_what_is_there() -> None:
    named = re.findall(r"^\| `(Deltic\w+)` \|", PAGE, re.M)
    assert named == [rule["alert"] for rule in rules()]
    for path in re.findall(r"deploy/[\w./-]*\w", PAGE):
        assert (ROOT / path).exists() or path.startswith("deploy/secrets"), path
    missing = [path for path in FILES if path.startswith("deploy/") and Path(path).name not in PAGE]
    assert missing == ["deploy/grafana/datasource.yaml", "deploy/grafana/provider.yaml"], "both belong to compose.yaml"
    assert {*re.findall(r"`deltic_\w+`", PAGE)} <= {f"`{name}`" for name in all_metrics().kinds}


def test_the_page_names_options_of_the_commands() -> None:
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    options = {option for command in ("serve", "inspect", "doctor")
               for option in command_parser(command)._option_string_actions}
    docker = {"--build-arg", "--cap-drop", "--entrypoint", "--format", "--read-only", "--rm", "--stop-timeout",
              "--tmpfs"}
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", " ".join(re.findall(r"`[^`\n]+`", prose)))}
    assert named - docker <= options and len(named) > 10


def test_the_kubernetes_manifest_fits_the_image(tmp_path: Path) -> None:
    [manifest] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    spec = yaml.safe_load(manifest)["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert {probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")} < SERVED
    assert {container["ports"][0]["containerPort"]} == {int(only(FINAL, "EXPOSE"))}
    assert spec["terminationGracePeriodSeconds"] >= DRAIN + 60
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {*json.loads(only(FINAL, "VOLUME"))}
    assert str(spec["securityContext"]["fsGroup"]) == only(FINAL, "USER").split(":")[1]
    keys = container["args"].index("--api-key-file") + 1
    assert container["args"][keys].startswith("/run/secrets/deltic/")
    (tmp_path / "keys").touch()
    words = [*container["args"][:keys], str(tmp_path / "keys"), *container["args"][keys + 1:]]
    assert served_by(words).model == "Qwen/Qwen3.5-0.8B"


# The image, as far as that is possible without one


@pytest.mark.slow
def test_the_container_builds_and_serves(tmp_path: Path) -> None:
    """Runs the build stage on a clean checkout, in an environment of its own, and the final stage's command."""
    source, home = tmp_path / "src", tmp_path / "opt" / "deltic"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tmp_path / "src")], input=archive, check=True)
    for path in sorted(source.rglob("*")):  # what the build context lacks
        if path.is_file() and not sent(str(path.relative_to(source))):
            path.unlink()
    tools = tmp_path / "tools"
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    variables |= {"PATH": f"{tools}/bin:{os.environ['PATH']}", "TORCH_INDEX": "", "EXTRAS": ""}
    steps = [rest for name, rest in BUILD if name == "RUN" and "apt-get" not in rest]
    assert len(steps) == 3
    for step in steps:
        done = subprocess.run(["sh", "-c", step.replace("/opt/deltic", str(home))], cwd=source, env=variables,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in home.rglob("libdeltic.so")] == ["libdeltic.so"]
    installed = {path.name.split("-")[0] for path in (home / "lib").rglob("*.dist-info")}
    assert "deltic" in installed and not installed & {"pip", "pytest"}
    for status in serving(tmp_path, home):
        assert status == 0


def serving(place: Path, home: Path) -> Iterator[int]:
    """Starts the server as the container does, checks it and its health check, and stops it. Yields exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [*json.loads(only(FINAL, "ENTRYPOINT")), *json.loads(only(FINAL, "CMD")), "--port", port]
    variables = {"PATH": f"{home}/bin:/usr/bin:/bin", "DELTIC_API_KEY": "secret", "HOME": str(place)}
    variables |= {name: value.replace("/", f"{place}/", 1) for name, value in environment().items() if name != "PATH"}
    words = [word.replace("/var/lib", f"{place}/var/lib") for word in words]
    check = json.loads(only(FINAL, "HEALTHCHECK").partition("CMD ")[2].replace("8000", port))
    with subprocess.Popen(words, cwd=place, env=variables) as server:
        try:
            wait_until(lambda: server.poll() is not None or subprocess.run(
                check, cwd=place, env=variables, capture_output=True).returncode == 0, 120)
            yield subprocess.run(check, cwd=place, env=variables).returncode
            base = f"http://127.0.0.1:{port}"
            key = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
            assert json.load(urlopen(f"{base}/ready"))["status"] == "ready"
            body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
            request = Request(f"{base}/v1/chat/completions", json.dumps(body).encode(), key)
            assert json.load(urlopen(request))["choices"][0]["message"]["content"] == "The capital of France is Paris."
            page = parse(urlopen(Request(f"{base}/metrics", headers=key)).read().decode())
            assert page.of("requests_finished_total", finished_reason="stop") == 1
            server.send_signal(signal.SIGTERM)
            yield server.wait(60)
        finally:
            server.kill()
    assert (place / "var" / "lib" / "deltic" / "deltic-prefixes" / "index.sqlite3").is_file()
