"""The fields of the manifests of Kubernetes that this project uses, with their types, to check manifests without a cluster.

Sources: TrainJob and TrainingRuntime of trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.2), JobSet of
jobset.x-k8s.io/v1alpha2, Job and Pod of Kubernetes 1.31. A dictionary lists the allowed fields; `{str: T}` is a map, `[T]` a
list, and a set has allowed values.
"""

from collections.abc import Iterator
from typing import Any

META: dict[Any, Any] = {"name": str, "namespace": str, "labels": {str: str}, "annotations": {str: str}}
ENV = {"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}
RESOURCES = {"limits": {str: (int, str)}, "requests": {str: (int, str)}}
POD = {
    "restartPolicy": {"Never", "OnFailure"},
    "terminationGracePeriodSeconds": int,
    "containers": [{"name": str, "image": str, "env": [ENV], "volumeMounts": [{"name": str, "mountPath": str}]}],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}, "emptyDir": {"medium": {"Memory", ""}}}],
}
JOB = {
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules": [{"action": {"FailJob", "Ignore", "Count"}, "onPodConditions": [{"type": str, "status": {"True", "False"}}]}]
    },
    "template": {"metadata": META, "spec": POD},
}
JOBSET = {
    "failurePolicy": {
        "maxRestarts": int,
        "rules": [
            {
                "name": str,
                "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
                "onJobFailureReasons": [{"BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy"}],
            }
        ],
    },
    "replicatedJobs": [{"name": str, "template": {"metadata": META, "spec": JOB}}],
}
SPECS = {
    "TrainJob": {
        "runtimeRef": {"apiGroup": str, "kind": {"TrainingRuntime", "ClusterTrainingRuntime"}, "name": str},
        "trainer": {
            "image": str,
            "command": [str],
            "args": [str],
            "env": [ENV],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": RESOURCES,
        },
    },
    "TrainingRuntime": {"mlPolicy": {"numNodes": int, "torch": {}}, "template": {"metadata": META, "spec": JOBSET}},
}


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what a cluster would reject in a TrainJob or a TrainingRuntime."""
    head = {"apiVersion": {"trainer.kubeflow.org/v1alpha1"}, "kind": set(SPECS), "metadata": META}
    return list(compare(manifest, head | {"spec": SPECS.get(manifest["kind"], {})}, manifest["kind"]))


def compare(value: Any, schema: Any, path: str) -> Iterator[str]:
    """Yield a line for each part of `value` that `schema` does not allow."""
    if isinstance(schema, dict | list) and not isinstance(value, type(schema)):
        yield f"{path}: expected a {type(schema).__name__}, got {value!r}"
    elif isinstance(schema, dict):
        for key, item in value.items():
            if (kind := schema.get(str, schema.get(key))) is None:
                yield f"{path}.{key}: there is no such field"
            else:
                yield from compare(item, kind, f"{path}.{key}")
    elif isinstance(schema, list):
        for i, item in enumerate(value):
            yield from compare(item, schema[0], f"{path}[{i}]")
    elif not (value in schema if isinstance(schema, set) else isinstance(value, schema) and not isinstance(value, bool)):
        yield f"{path}: expected {schema}, got {value!r}"
