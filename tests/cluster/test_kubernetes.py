"""The manifest for Kubernetes follows the published schemas, and gives each pod its index."""

from pathlib import Path

import pytest
import yaml

from hier_allreduce.cluster.environment import job_of

MANIFEST = Path(__file__).parents[2] / "configs" / "kubernetes" / "train.yaml"
BY_KIND = {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("version", ["1.28", "1.34"])
@pytest.mark.parametrize("kind", list(BY_KIND))
def test_every_object_follows_the_published_schema(kind, version):
    validate = pytest.importorskip("kubernetes_validate")  # not made for Python 3.7
    validate.validate(BY_KIND[kind], version, strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**BY_KIND[kind], "spce": {}}, version, strict=True)


def test_each_pod_is_one_of_the_hosts_and_only_they_reach_each_other():
    job = BY_KIND["Job"]
    service = BY_KIND["Service"]
    pod = job["spec"]["template"]["spec"]
    index, config = pod["containers"][0]["env"]
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == (
        "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )
    count = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == count and pod["subdomain"] == service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    names = tuple(
        f"{job['metadata']['name']}-{task}.{pod['subdomain']}:{port}" for task in range(count)
    )
    for task in range(count):
        assert job_of({"TF_CONFIG": config["value"].replace("$(INDEX)", str(task))}) == (
            names,
            task,
        )
    labels = job["spec"]["template"]["metadata"]["labels"]
    policy = BY_KIND["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
