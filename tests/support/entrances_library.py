"""The entrances of `jaxgrow/`: which of them are attacked, and why are the others safe?

`entrances` describes the table.
"""

from entrances import Row, Subject, ours, todo

SUBJECTS: dict[str, Subject] = {}

ROWS: dict[str, Row] = {
    "jaxgrow/checkpoints/_transform.py::_is_huggingface": todo("no subject yet"),
    "jaxgrow/checkpoints/_transform.py::_snapshot": todo("no subject yet"),
    "jaxgrow/checkpoints/_transform.py::write": todo("no subject yet"),
    "jaxgrow/checkpoints/_transform.py::_history": todo("no subject yet"),
    "jaxgrow/checkpoints/hf/adapterhub.py::load": todo("no subject yet"),
    "jaxgrow/checkpoints/hf/peft/reading.py::load": todo("no subject yet"),
    "jaxgrow/checkpoints/hf/peft/reading.py::load_beside": todo("no subject yet"),
    "jaxgrow/checkpoints/hf/peft_settings.py::Settings.__init__": todo("no subject yet"),
    "jaxgrow/checkpoints/hf/storage.py::HuggingFace.__init__": todo("no subject yet"),
    "jaxgrow/checkpoints/io/checksums.py::seal": todo("no subject yet"),
    "jaxgrow/checkpoints/io/checksums.py::damage": todo("no subject yet"),
    "jaxgrow/checkpoints/io/checksums.py::sha256": todo("no subject yet"),
    "jaxgrow/checkpoints/io/files.py::read_json": todo("no subject yet"),
    "jaxgrow/checkpoints/io/files.py::write_json": todo("no subject yet"),
    "jaxgrow/checkpoints/io/files.py::extras": todo("no subject yet"),
    "jaxgrow/checkpoints/io/folders.py::_place": todo("no subject yet"),
    "jaxgrow/checkpoints/io/folders.py::_locked": todo("no subject yet"),
    "jaxgrow/checkpoints/io/folders.py::_no_others": todo("no subject yet"),
    "jaxgrow/checkpoints/io/folders.py::_remove": todo("no subject yet"),
    "jaxgrow/checkpoints/io/folders.py::_to_sync": todo("no subject yet"),
    "jaxgrow/checkpoints/io/folders.py::sync_folder": todo("no subject yet"),
    "jaxgrow/checkpoints/io/replacing.py::_record": todo("no subject yet"),
    "jaxgrow/checkpoints/io/replacing.py::_hugging_face": todo("no subject yet"),
    "jaxgrow/checkpoints/io/safetensors.py::Tensor._at": todo("no subject yet"),
    "jaxgrow/checkpoints/io/safetensors.py::tensors": todo("no subject yet"),
    "jaxgrow/checkpoints/io/safetensors.py::_indexed": todo("no subject yet"),
    "jaxgrow/checkpoints/io/safetensors.py::header": todo("no subject yet"),
    "jaxgrow/checkpoints/io/safetensors.py::write_file": todo("no subject yet"),
    "jaxgrow/checkpoints/orbax.py::Orbax.__init__": todo("no subject yet"),
    "jaxgrow/checkpoints/orbax.py::Orbax._load": todo("no subject yet"),
    "jaxgrow/checkpoints/orbax.py::Orbax._some": todo("no subject yet"),
    "jaxgrow/checkpoints/orbax.py::Orbax.shard": todo("no subject yet"),
    "jaxgrow/checkpoints/orbax.py::write": todo("no subject yet"),
    "jaxgrow/checkpoints/orbax.py::export": todo("no subject yet"),
    "jaxgrow/checkpoints/orbax.py::_put": ours(
        "it renames folders that it made, in the folder of a run"
    ),
    "jaxgrow/checkpoints/orbax.py::_delete_unfinished": ours(
        "it deletes working folders of exports"
    ),
    "jaxgrow/cli/grow_commands.py::run_show": todo("no subject yet"),
    "jaxgrow/cli/model_inputs.py::tokenizer_notes": todo("no subject yet"),
    "jaxgrow/cli/model_inputs.py::_tokens": todo("no subject yet"),
    "jaxgrow/cli/model_inputs.py::_images": todo("no subject yet"),
    "jaxgrow/cli/model_inputs.py::_array": todo("no subject yet"),
    "jaxgrow/cli/model_inputs.py::_tokenised": todo("no subject yet"),
    "jaxgrow/cli/program.py::main": todo("no subject yet"),
    "jaxgrow/integrations/command.py::_is_ours": todo("no subject yet"),
    "jaxgrow/integrations/command.py::opened": todo("no subject yet"),
    "jaxgrow/integrations/easydel_tree.py::EasydelTree.__init__": todo("no subject yet"),
    "jaxgrow/integrations/easydel_tree.py::EasydelWriter.finish": todo("no subject yet"),
    "jaxgrow/integrations/formats.py::from_file": todo("no subject yet"),
    "jaxgrow/integrations/levanter_tree.py::LevanterWriter.finish": todo("no subject yet"),
    "jaxgrow/integrations/orbax_run.py::record": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::OrbaxTree.__init__": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::OrbaxTree.open": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::OrbaxTree.read": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::OrbaxTree._described": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::Writer.write": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::Writer._describe_arrays": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::_copy": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::database": todo("no subject yet"),
    "jaxgrow/integrations/orbax_tree.py::_write": todo("no subject yet"),
    "jaxgrow/integrations/torch_optimizer.py::read_file": todo("no subject yet"),
    "jaxgrow/integrations/torch_optimizer.py::write_file": todo("no subject yet"),
    "jaxgrow/integrations/torch_optimizer.py::parameter_groups": todo("no subject yet"),
    "jaxgrow/integrations/torch_optimizer.py::read_distributed": todo("no subject yet"),
    "jaxgrow/integrations/torch_optimizer.py::write_distributed": todo("no subject yet"),
    "jaxgrow/integrations/torch_optimizer.py::write_beside": todo("no subject yet"),
    "jaxgrow/integrations/torch_tree.py::TorchTree.__init__": todo("no subject yet"),
    "jaxgrow/integrations/torch_tree.py::TorchTree._load": todo("no subject yet"),
    "jaxgrow/integrations/torch_tree.py::TorchWriter._save": todo("no subject yet"),
    "jaxgrow/integrations/torch_tree.py::TorchWriter._merge": todo("no subject yet"),
    "jaxgrow/untrusted.py::CheckedPath.open": todo("no subject yet"),
    "jaxgrow/untrusted.py::open_regular": todo("no subject yet"),
}

# The number of rows that still need a subject.
OPEN = 69
