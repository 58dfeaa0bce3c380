package peer

import (
	"crypto/sha256"
	"unique"
)

// fileStore holds descriptor files by their content. Equal ones are shared with
// the directory, and kept as long as a record names them. It is used under
// Exchange.mu.
type fileStore struct {
	files  map[fileHash]*file
	hashes map[unique.Handle[string]]fileHash
}

type file struct {
	content unique.Handle[string]
	refs    int
}

func newFileStore() *fileStore {
	return &fileStore{files: map[fileHash]*file{}, hashes: map[unique.Handle[string]]fileHash{}}
}

// hash returns the hash of a file of the directory, which the store holds from
// now on, until sweep finds that no record has it.
func (s *fileStore) hash(content unique.Handle[string]) fileHash {
	h, ok := s.hashes[content]
	if !ok {
		h = sha256.Sum256([]byte(content.Value()))
		s.put(h, content)
	}
	return h
}

func (s *fileStore) put(h fileHash, content unique.Handle[string]) {
	if s.files[h] == nil {
		s.files[h] = &file{content: content}
		s.hashes[content] = h
	}
}

// get returns a file that the store holds.
func (s *fileStore) get(h fileHash) unique.Handle[string] { return s.files[h].content }

// missing returns those that the store lacks.
func (s *fileStore) missing(hs []fileHash) []fileHash {
	var out []fileHash
	for _, h := range hs {
		if s.files[h] == nil {
			out = append(out, h)
		}
	}
	return out
}

func (s *fileStore) retain(hs []fileHash) {
	for _, h := range hs {
		s.files[h].refs++
	}
}

func (s *fileStore) release(hs []fileHash) {
	for _, h := range hs {
		s.files[h].refs--
	}
}

// sweep forgets what no record names.
func (s *fileStore) sweep() {
	for h, f := range s.files {
		if f.refs == 0 {
			delete(s.files, h)
			delete(s.hashes, f.content)
		}
	}
}

// intern returns the content of a file as it is shared, and its hash.
func intern(content []byte) (unique.Handle[string], fileHash) {
	return unique.Make(string(content)), sha256.Sum256(content)
}
