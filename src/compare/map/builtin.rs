/*!
Maps that are built in: the names under which engines and their own dumpers write tensors of an MLA layer.

Each is a file of `[tensors]` entries, to be named as `base` of a map that says the rest (versions, lengths, geometry): names are
the software's, lengths never are. Entries whose array a dump lacks count as not captured.
*/

/// A built-in map.
pub struct BuiltIn {
    /// Name, for `base`.
    pub name: &'static str,
    /// What it reads.
    pub about: &'static str,
    /// Entries, as TOML.
    pub tensors: &'static str,
}

/// All of them.
pub static BUILT_IN: &[BuiltIn] = &[
    BuiltIn {
        name: "vllm",
        about: "outputs of vLLM's modules by their paths",
        tensors: include_str!("../maps/vllm.toml"),
    },
    BuiltIn {
        name: "sglang",
        about: "SGLang's --debug-tensor-dump-output-folder: one file a forward pass, modules by their paths",
        tensors: include_str!("../maps/sglang.toml"),
    },
    BuiltIn {
        name: "sglang-dumper",
        about: "SGLang's dumper with DUMPER_NON_INTRUSIVE_MODE=all: one file a tensor",
        tensors: include_str!("../maps/sglang-dumper.toml"),
    },
    BuiltIn {
        name: "flashinfer-mla",
        about: "FlashInfer's level-10 log of BatchMLAPagedAttentionWrapper.run",
        tensors: include_str!("../maps/flashinfer-mla.toml"),
    },
    BuiltIn {
        name: "flashinfer-ragged",
        about: "FlashInfer's level-10 log of BatchPrefillWithRaggedKVCacheWrapper.run",
        tensors: include_str!("../maps/flashinfer-ragged.toml"),
    },
    BuiltIn {
        name: "llama.cpp",
        about: "nodes of llama.cpp's graph by their names",
        tensors: include_str!("../maps/llama.cpp.toml"),
    },
    BuiltIn {
        name: "hf",
        about: "outputs of the modules of transformers' attention by their paths",
        tensors: include_str!("../maps/hf.toml"),
    },
];

/// The built-in map of a name; else what there is.
///
/// # Errors
/// The names that there are.
pub fn built_in(name: &str) -> Result<&'static BuiltIn, String> {
    BUILT_IN.iter().find(|b| b.name == name).ok_or_else(|| {
        let all: Vec<&str> = BUILT_IN.iter().map(|b| b.name).collect();
        format!("write one of {}", all.join(", "))
    })
}
