package transcode_test

import (
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unique"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/fingerpost/fingerpost/nodecache"
	"github.com/fingerpost/fingerpost/test/harness"
	"github.com/fingerpost/fingerpost/xds/resources/transcode"
)

func get(path string) *annotations.HttpRule {
	return &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: path}}
}

func field(name string, n int32, t descriptorpb.FieldDescriptorProto_Type, l descriptorpb.FieldDescriptorProto_Label) *descriptorpb.FieldDescriptorProto {
	f := &descriptorpb.FieldDescriptorProto{Name: proto.String(name), Number: proto.Int32(n), Type: t.Enum(), Label: l.Enum()}
	if t == descriptorpb.FieldDescriptorProto_TYPE_MESSAGE {
		f.TypeName = proto.String(".lib.Item")
	}
	return f
}

// lib is lib.proto: service lib.Books with a method M0, M1, ... for each rule
// (nil: none), over a message with fields id, tags (repeated) and item.
func lib(rules ...*annotations.HttpRule) *descriptorpb.FileDescriptorProto {
	const one, many = descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL, descriptorpb.FieldDescriptorProto_LABEL_REPEATED
	fd := &descriptorpb.FileDescriptorProto{
		Name: proto.String("lib.proto"), Package: proto.String("lib"), Syntax: proto.String("proto3"),
		Dependency: []string{"google/api/annotations.proto"},
		MessageType: []*descriptorpb.DescriptorProto{{Name: proto.String("Item"), Field: []*descriptorpb.FieldDescriptorProto{
			field("id", 1, descriptorpb.FieldDescriptorProto_TYPE_STRING, one),
			field("tags", 2, descriptorpb.FieldDescriptorProto_TYPE_STRING, many),
			field("item", 3, descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, one),
		}}},
		Service:        []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("Books")}},
		SourceCodeInfo: &descriptorpb.SourceCodeInfo{Location: []*descriptorpb.SourceCodeInfo_Location{{Path: []int32{4}, Span: []int32{1, 2, 3}}}},
	}
	for i, r := range rules {
		m := &descriptorpb.MethodDescriptorProto{Name: proto.String(fmt.Sprint("M", i)), InputType: proto.String(".lib.Item"), OutputType: proto.String(".lib.Item")}
		if r != nil {
			m.Options = &descriptorpb.MethodOptions{}
			proto.SetExtension(m.Options, annotations.E_Http, r)
		}
		fd.Service[0].Method = append(fd.Service[0].Method, m)
	}
	return fd
}

func port(t *testing.T, files ...*descriptorpb.FileDescriptorProto) *nodecache.PortInfo {
	t.Helper()
	p := &nodecache.PortInfo{Port: 1, State: nodecache.PortServes, Linkable: true, Hash: "x", Services: []nodecache.Service{{Name: "lib.Books"}}}
	for _, f := range files {
		raw, err := proto.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		p.Files = append(p.Files, unique.Make(string(raw)))
	}
	return p
}

var api = []*descriptorpb.FileDescriptorProto{
	protodesc.ToFileDescriptorProto(annotations.File_google_api_annotations_proto),
	protodesc.ToFileDescriptorProto(annotations.File_google_api_http_proto),
	protodesc.ToFileDescriptorProto(descriptorpb.File_google_protobuf_descriptor_proto),
}

func link(t *testing.T, rules ...*annotations.HttpRule) *transcode.Set {
	t.Helper()
	s, err := transcode.Link(port(t, append(slices.Clone(api), lib(rules...))...))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSetHasImportsBeforeImportersAndNothingElse(t *testing.T) {
	other := &descriptorpb.FileDescriptorProto{Name: proto.String("other.proto"), Package: proto.String("other"), Syntax: proto.String("proto3")}
	files := append(slices.Clone(api), lib(get("/v1/{id}"), nil), other)
	var first []byte
	for range 10 {
		rand.Shuffle(len(files), func(i, j int) { files[i], files[j] = files[j], files[i] })
		s, err := transcode.Link(port(t, files...))
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = s.Descriptors
		}
		if string(first) != string(s.Descriptors) || !slices.Equal(s.Services, []string{"lib.Books"}) || len(s.Dropped) != 0 {
			t.Fatalf("another order of files gives other descriptors: %v, dropped %v", s.Services, s.Dropped)
		}
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(first, &set); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range set.GetFile() {
		for _, dep := range f.GetDependency() {
			if !seen[dep] {
				t.Errorf("%s is there before %s", f.GetName(), dep)
			}
		}
		if seen[f.GetName()] = true; f.GetSourceCodeInfo() != nil {
			t.Errorf("%s has its source", f.GetName())
		}
	}
	if len(seen) != 4 || seen["other.proto"] {
		t.Errorf("files %v", seen)
	}
}

func TestWhatEveryLibraryBringsMayBeMissing(t *testing.T) {
	if s, err := transcode.Link(port(t, lib(get("/v1/{id}")))); err != nil || len(s.Services) != 1 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestDescriptorsThatDoNotLinkAreRefused(t *testing.T) {
	missing, wrong, cyclic := lib(get("/v1/{id}")), lib(get("/v1/{id}")), lib(get("/v1/{id}"))
	missing.Dependency = append(missing.Dependency, "gone.proto")
	wrong.Service[0].Method[0].InputType = proto.String(".lib.Gone")
	cyclic.Dependency = append(cyclic.Dependency, "lib.proto")
	huge := lib(get("/v1/{id}"))
	for i := range 4000 {
		huge.MessageType = append(huge.MessageType, &descriptorpb.DescriptorProto{Name: proto.String(fmt.Sprintf("%s%d", strings.Repeat("Long", 8), i))})
	}
	twice := &descriptorpb.FileDescriptorProto{
		Name: proto.String("twice.proto"), Package: proto.String("lib"), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{{Name: proto.String("Item")}},
	}
	marked := port(t, lib(get("/v1/{id}")))
	marked.Linkable = false
	junk := port(t, lib(get("/v1/{id}")))
	junk.Files = append(junk.Files, unique.Make("\x0a\xff"))
	for says, p := range map[string]*nodecache.PortInfo{
		"gone.proto":       port(t, missing),
		"lib.Gone":         port(t, wrong),
		"imports itself":   port(t, cyclic),
		"more than":        port(t, huge),
		"lib.Item":         port(t, lib(get("/v1/{id}")), twice),
		"not complete":     marked,
		"not a descriptor": junk,
	} {
		if s, err := transcode.Link(p); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v, %v; want an error with %q", s, err, says)
		}
	}
}

func TestProgramsWithoutRulesAreNotLookedAt(t *testing.T) {
	for rules, want := range map[*annotations.HttpRule]bool{nil: false, get("/v1"): true} {
		if got := transcode.Annotated(port(t, lib(rules))); got != want {
			t.Errorf("%v: %v", rules, got)
		}
	}
	if s := link(t, nil); len(s.Services) != 0 || s.Descriptors != nil {
		t.Errorf("%+v", s)
	}
}

var ruleTable = []struct {
	name string
	rule *annotations.HttpRule
	says string // why it is dropped; empty: kept
}{
	{"literal", get("/v1/books"), ""},
	{"variable", get("/v1/{id}"), ""},
	{"nested", get("/v1/{item.id}/x"), ""},
	{"pattern", get("/v1/{id=books/*}"), ""},
	{"rest", get("/v1/{id=books/**}"), ""},
	{"verb", get("/v1/{id}:check"), ""},
	{"verb of a literal", get("/v1/books:check"), ""},
	{"stars", get("/*/x/**"), ""},
	{"escapes", get("/v1/a-b_c.d~e%20"), ""},
	{"body", &annotations.HttpRule{Pattern: &annotations.HttpRule_Post{Post: "/v1"}, Body: "*"}, ""},
	{"field of the body", &annotations.HttpRule{Pattern: &annotations.HttpRule_Patch{Patch: "/v1"}, Body: "item"}, ""},
	{"custom", &annotations.HttpRule{Pattern: &annotations.HttpRule_Custom{Custom: &annotations.CustomHttpPattern{Kind: "HEAD", Path: "/v1"}}}, ""},
	{"further", &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: "/v1"}, AdditionalBindings: []*annotations.HttpRule{get("/v2"), get("/v3/{id}")}}, ""},

	{"root", get("/"), "bad segment"},
	{"empty", get(""), "slash"},
	{"relative", get("v1"), "slash"},
	{"slash at the end", get("/v1/"), "ends with a slash"},
	{"two slashes", get("/v1//x"), "bad segment"},
	{"open brace", get("/v1/{id"), "not closed"},
	{"no name", get("/v1/{}"), "bad variable"},
	{"tail of a variable", get("/v1/{id}x"), "follows"},
	{"variable in a segment", get("/v1/x{id}"), "bad segment"},
	{"rest in the middle", get("/v1/**/x"), "not the last"},
	{"rest in a variable in the middle", get("/v1/{id=**}/x"), "not the last"},
	{"no such field", get("/v1/{name}"), `no field "name"`},
	{"repeated field", get("/v1/{tags}"), "repeated"},
	{"message", get("/v1/{item}"), "no place"},
	{"within a string", get("/v1/{id.x}"), "no place"},
	{"no method", &annotations.HttpRule{}, "no HTTP method"},
	{"any method", &annotations.HttpRule{Pattern: &annotations.HttpRule_Custom{Custom: &annotations.CustomHttpPattern{Kind: "*", Path: "/v1"}}}, "no HTTP method"},
	{"no such body", &annotations.HttpRule{Pattern: &annotations.HttpRule_Post{Post: "/v1"}, Body: "name"}, `no field "name"`},
	{"no such response", &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: "/v1"}, ResponseBody: "name"}, `no field "name"`},
	{"response of another type", &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: "/v1"}, ResponseBody: "item"}, `no field "item" of google.api.HttpBody`},
	{"further of further", &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: "/v1"}, AdditionalBindings: []*annotations.HttpRule{
		{Pattern: &annotations.HttpRule_Get{Get: "/v2"}, AdditionalBindings: []*annotations.HttpRule{get("/v3")}}}}, "further binding"},
	{"twice the same", &annotations.HttpRule{Pattern: &annotations.HttpRule_Get{Get: "/v1/{id}"}, AdditionalBindings: []*annotations.HttpRule{get("/v1/*")}}, "twice"},
}

func TestRulesThatCannotBeRegisteredDropTheirMethod(t *testing.T) {
	for _, c := range ruleTable {
		s := link(t, c.rule, get("/always/{id}"))
		if !slices.Equal(s.Services, []string{"lib.Books"}) {
			t.Errorf("%s: the other method is gone, too", c.name)
		}
		if got := strings.Join(s.Dropped, " "); (c.says == "") != (got == "") || !strings.Contains(got, c.says) {
			t.Errorf("%s: dropped %q, want %q", c.name, got, c.says)
		}
	}
	// One that another method has already.
	s := link(t, get("/v1/{id}"), get("/v1/{item.id}"), nil)
	if len(s.Dropped) != 1 || !strings.HasPrefix(s.Dropped[0], "lib.Books.M1: GET /v1/* is taken by lib.Books.M0") {
		t.Errorf("dropped %q", s.Dropped)
	}
}

// Envoy has the last word: it must take every rule that was kept, beside what
// was dropped.
func TestEnvoyTakesWhatIsLeft(t *testing.T) {
	envoy := harness.Tool(t, "envoy")
	for _, c := range ruleTable {
		s := link(t, c.rule, get("/always/{id}"), nil)
		text := fmt.Sprintf(`{"static_resources": {"listeners": [{"name": "l", "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
			"filter_chains": [{"filters": [{"name": "h", "typed_config": {
				"@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
				"stat_prefix": "x", "route_config": {}, "http_filters": [
					{"name": "envoy.filters.http.grpc_json_transcoder", "typed_config": {
						"@type": "type.googleapis.com/envoy.extensions.filters.http.grpc_json_transcoder.v3.GrpcJsonTranscoder",
						"proto_descriptor_bin": %q, "services": ["lib.Books"]}},
					{"name": "r", "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}]}}]}]}]}}`,
			base64.StdEncoding.EncodeToString(s.Descriptors))
		file := filepath.Join(t.TempDir(), "envoy.json")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(envoy, "--mode", "validate", "-l", "error", "-c", file).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", c.name, err, out)
		}
	}
}
