package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// image is what an image is but for its files.
type image struct {
	name       string // with a tag
	arch       string
	entrypoint []string
	args       []string
	labels     map[string]string
}

// write makes the archive and returns the digest of the image's manifest and
// the size of its compressed layer in bytes.
func (i image) write(root tree, file string) (digest string, size int64, err error) {
	img, err := i.build(root)
	if err != nil {
		return "", 0, err
	}
	tag, err := name.NewTag(i.name)
	if err != nil {
		return "", 0, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(file), ".image-")
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// containerd takes the whole name from the first annotation, with Docker
	// Hub called as Docker calls it; others take the tag from the second.
	full := strings.Replace(tag.Name(), "index.docker.io/", "docker.io/", 1)
	at, err := layout.Write(dir, empty.Index)
	if err != nil {
		return "", 0, err
	}
	if err := at.AppendImage(img, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          full,
		"org.opencontainers.image.ref.name": tag.TagStr(),
	})); err != nil {
		return "", 0, err
	}
	if err := forDocker(img, i.name, filepath.Join(dir, "manifest.json")); err != nil {
		return "", 0, err
	}
	tmp := filepath.Join(dir, "archive")
	if err := pack(dir, tmp); err != nil {
		return "", 0, err
	}
	sum, err := img.Digest()
	if err != nil {
		return "", 0, err
	}
	layers, err := img.Layers()
	if err != nil {
		return "", 0, err
	}
	if size, err = layers[0].Size(); err != nil {
		return "", 0, err
	}
	return sum.String(), size, os.Rename(tmp, file)
}

func (i image) build(root tree) (v1.Image, error) {
	var content bytes.Buffer
	if err := root.tar(&content); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(
		func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content.Bytes())), nil },
		tarball.WithCompressionLevel(gzip.BestCompression), tarball.WithCompressedCaching, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(mutate.MediaType(mutate.ConfigMediaType(empty.Image, types.OCIConfigJSON), types.OCIManifestSchema1), layer)
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", i.arch
	config.Config.Entrypoint, config.Config.Cmd, config.Config.Labels = i.entrypoint, i.args, i.labels
	config.Config.Env = []string{"PATH=/"}
	return mutate.ConfigFile(img, config)
}

// forDocker writes the manifest.json by which docker load before version 25
// finds its way in the archive.
func forDocker(img v1.Image, name, file string) error {
	config, err := img.ConfigName()
	if err != nil {
		return err
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	blob := func(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }
	m := struct {
		Config   string
		RepoTags []string
		Layers   []string
	}{Config: blob(config), RepoTags: []string{name}}
	for _, l := range layers {
		h, err := l.Digest()
		if err != nil {
			return err
		}
		m.Layers = append(m.Layers, blob(h))
	}
	text, err := json.Marshal([]any{m})
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}

// pack writes the files below dir to a tar archive, in the order of their
// names and without times and owners.
func pack(dir, file string) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	out := tar.NewWriter(f)
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || p == file {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: rel, Mode: 0o644, Size: info.Size(), Format: tar.FormatUSTAR}); err != nil {
			return err
		}
		src, err := os.Open(p)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, src)
		if err = errors.Join(err, src.Close()); err != nil {
			return fmt.Errorf("%s: %w", rel, err)
		}
		return nil
	})
	return errors.Join(err, out.Close())
}
