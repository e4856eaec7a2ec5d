"""What the agent shows on the Node, as patches: functions of values, which ``publish`` writes."""

from mig_manager.core import model
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import inventory_codec, journals, requests, run_status


def of_run(
    status: run_status.RunStatus, record: requests.RequestRecord, boot_id: str
) -> node_object.NodePatch:
    """Return the patch with a status, its GPUs, and the record of the request."""
    patch = of_status(status)
    if status.observed_gpus is not None:
        annotations = of_gpus(status.observed_gpus)
        patch = patch.merge(node_object.NodePatch(annotations=annotations))
    return patch.merge(of_request(record, status.gpus, boot_id))


def of_status(status: run_status.RunStatus) -> node_object.NodePatch:
    """Return the label and the annotation with a status."""
    return node_object.NodePatch(
        labels={well_known.STATE_LABEL: status.state.value},
        annotations={well_known.STATUS_ANNOTATION: status.to_json()},
    )


def of_request(
    record: requests.RequestRecord, gpus: model.ObservedGpus, boot_id: str
) -> node_object.NodePatch:
    """Return the patch with the record, and without the label of a layout that is gone."""
    is_outdated = record.is_label_outdated(gpus, boot_id)
    gone = dict.fromkeys([well_known.APPLIED_LABEL] if is_outdated else ())
    return node_object.NodePatch(labels=gone, annotations=of_record(record))


def of_record(record: requests.RequestRecord) -> dict[str, str | None]:
    """Return the annotation with the record of a request; an empty record removes it."""
    has_any = record.layout or record.applied_fingerprints
    return {well_known.REQUEST_ANNOTATION: record.to_json() if has_any else None}


def of_journal(journal: journals.Journal) -> node_object.NodePatch:
    """Return the patch with the journal; an empty one removes the annotation."""
    is_empty = journal.remainder is journals.Remainder.NOTHING
    text = None if is_empty else journal.to_json()
    return node_object.NodePatch(annotations={well_known.JOURNAL_ANNOTATION: text})


def of_gpus(gpus: model.ObservedGpus) -> dict[str, str | None]:
    """Return the annotation with observed GPUs; without a GPU, remove it and the use."""
    if not gpus:
        return {well_known.GPUS_ANNOTATION: None, well_known.CAPACITY_ANNOTATION: None}
    return {well_known.GPUS_ANNOTATION: inventory_codec.to_json(gpus)}
