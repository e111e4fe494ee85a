"""deploy/k8s: the manifests fit Kubernetes' own schemas, the command line, and each other."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from coord.http.connection import OPEN_PATHS
from tests.test_deploy import STOP_S, containerfile, understood
from tools.keygen import run_keygen
from transport.config import Config, loads

ROOT = Path(__file__).resolve().parent.parent
K8S = ROOT / "deploy" / "k8s"
FILES = sorted(path.name for path in K8S.glob("*.yaml"))
VERSIONS = ("1.30", "1.33")  # of Kubernetes
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


def documents() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    texts = [(K8S / name).read_text() for name in FILES]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents() if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def pods() -> dict[str, dict[str, Any]]:
    """The pod templates by kind."""
    kinds = ("StatefulSet", "Deployment", "Job")
    return {d["kind"]: d["spec"]["template"] for d in documents() if d["kind"] in kinds}


def containers() -> list[dict[str, Any]]:
    specs = [pod["spec"] for pod in pods().values()]
    return [each for s in specs for each in (*s.get("initContainers", []), *s["containers"])]


def stages() -> dict[str, str]:
    """Pod name -> DNS name within the namespace, as the StatefulSet gives them."""
    spec = one("StatefulSet", "stage")["spec"]
    names = [f"stage-{index}" for index in range(spec["replicas"])]
    return {name: f"{name}.{spec['serviceName']}" for name in names}


@pytest.fixture
def ring(tmp_path: Path) -> Config:
    """The ConfigMap's ring.toml, loaded with keys that keygen made as the page says."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith("    kvring keygen ")]
    options = understood(shlex.split(line.removeprefix("    kvring ")))
    names = options["name"]
    run_keygen(ring=None, names=names, folder=tmp_path / options["folder"], force=False)
    text: str = one("ConfigMap", "kvring-ring")["data"]["ring.toml"]
    return loads(text.replace("/etc/kvring-public", str(tmp_path / options["folder"])))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_a_manifest_fits_the_schema(name: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all((K8S / name).read_text()))
    assert found
    for document in found:
        validator.validate(document, version, strict=True)


def test_the_schema_sees_a_mistake() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    broken = one("StatefulSet", "stage")
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 15
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, VERSIONS[-1], strict=True)


def test_command_lines_are_understood() -> None:
    found = {}
    for each in containers():
        if "args" in each:
            found[each["name"]] = understood(each["args"])
        else:
            assert each["command"][0] == "install"
    assert found["stage"]["name"] == "$(POD_NAME)"
    ring = Path("/etc/kvring/ring.toml")
    assert {found[name]["ring"] for name in ("stage", "coordinator")} == {ring}
    for name in ("stage", "coordinator"):
        assert not found[name]["insecure"]
        mounts = {m["name"]: m["mountPath"] for m in container(name)["volumeMounts"]}
        assert mounts["ring"] == str(ring.parent)
    model = Path(one("ConfigMap", "kvring-ring")["data"]["ring.toml"].split('path = "')[1])
    assert str(model).startswith(f"{found['pull']['models']}/{found['pull']['name']}/")


def container(name: str) -> dict[str, Any]:
    (found,) = [each for each in containers() if each["name"] == name]
    return found


def test_the_rings_addresses_are_the_pods(ring: Config) -> None:
    (only,) = ring.rings
    assert {s.name: s.address for s in only.stages} == {
        name: f"tcp://{host}:7000" for name, host in stages().items()
    }
    headless = one("Service", "stages")["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["selector"] == pods()["StatefulSet"]["metadata"]["labels"]
    host, port = only.verdicts.removeprefix("tcp://").split(":")
    service = one("Service", host)["spec"]
    assert service["selector"] == pods()["Deployment"]["metadata"]["labels"]
    for found in (headless, service):
        assert found["publishNotReadyAddresses"], "else nobody could become ready"
        assert [each["port"] for each in found["ports"]] == [int(port)]
    for listens in (only.listen, *(stage.listen for stage in only.stages)):
        assert listens == f"tcp://0.0.0.0:{port}"
    assert {each["containerPort"] for each in container("stage")["ports"]} == {int(port)}


def test_a_process_sees_its_own_secret_key_alone(ring: Config) -> None:
    (only,) = ring.rings
    seen = {each["name"]: each for each in containers()}
    assert all(
        mount["name"] != "keys"
        for name in ("stage", "coordinator")
        for mount in seen[name]["volumeMounts"]
    )
    for pod, path in (("StatefulSet", "$(POD_NAME).secret"), ("Deployment", "coordinator.secret")):
        inits = pods()[pod]["spec"]["initContainers"]
        (copies,) = [each for each in inits if each["name"] == "own-key"]
        (mount,) = [m for m in copies["volumeMounts"] if m["name"] == "keys"]
        assert mount.get("subPathExpr", mount.get("subPath")) == path
        _, flag, mode, source, target = copies["command"]
        assert (flag, mode, source) == ("-m", "0600", mount["mountPath"])
        assert {stage.secret_key_file for stage in only.stages} == {target}
        assert ring.coordinator.secret_key_file == target
    for volume in pods()["StatefulSet"]["spec"]["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440, "for the group alone"


def test_probes_ask_what_can_be_asked(ring: Config) -> None:
    coordinator = container("coordinator")
    port = int(ring.coordinator.http.rpartition(":")[2])
    assert {"name": "http", "containerPort": port} in coordinator["ports"]
    for probe, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
        assert coordinator[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "http"}
        assert path in OPEN_PATHS, "no key is needed"
    command = container("stage")["readinessProbe"]["exec"]["command"]
    assert f":{7000:04X} 00000000:0000 0A" in command
    assert "livenessProbe" not in container("stage")


def test_a_pod_waits_for_the_drain(ring: Config) -> None:
    grace = {kind: pod["spec"].get("terminationGracePeriodSeconds") for kind, pod in pods().items()}
    assert grace["Deployment"] >= ring.limits.drain_s + STOP_S
    assert grace["StatefulSet"] >= STOP_S
    spec = one("Deployment", "coordinator")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_pods_have_no_rights_they_do_not_need() -> None:
    (user,) = [argument for name, argument in containerfile()[-8:] if name == "USER"]
    for pod in pods().values():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == int(user)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in containers():
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(each["resources"]["requests"])
        assert "memory" in each["resources"]["limits"]


def test_every_volume_is_there_and_is_used() -> None:
    claims = {d["metadata"]["name"] for d in documents() if d["kind"] == "PersistentVolumeClaim"}
    wanted = set()
    for pod in pods().values():
        spec = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        every = (*spec.get("initContainers", []), *spec["containers"])
        mounts = [mount for each in every for mount in each["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes)
        for each in every:
            paths = [mount["mountPath"] for mount in each["volumeMounts"] if mount.get("readOnly")]
            for path in paths:
                inside = [p for p in paths if p != path and p.startswith(f"{path}/")]
                assert not inside, "no mount point can be made in a volume that is read only"
        for volume in volumes.values():
            wanted |= {volume.get("persistentVolumeClaim", {}).get("claimName")} - {None}
            made = volume.get("secret", {}).get("secretName")
            made = made or volume.get("configMap", {}).get("name")
            if made and made != "kvring-ring":
                assert f" {made} " in PAGE, "the page says how to make it"
    assert wanted == claims


def test_the_page_names_every_file() -> None:
    for name in FILES:
        assert f"deploy/k8s/{name}" in PAGE, name
