{{- /* The image with its tag. */ -}}
{{- define "understudy.image" -}}
{{- $version := ternary (printf "%s-ray" .Chart.AppVersion) .Chart.AppVersion .Values.cluster.enabled -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default $version }}
{{- end -}}

{{- /* A variable's value as text, with all digits of a whole number, which YAML may have read as a float. */ -}}
{{- define "understudy.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ printf "%.0f" . }}{{ else }}{{ toString . }}{{ end -}}
{{- end -}}

{{- /* Set variables of a pod's container instead of those that it has of these names: pod, env. */ -}}
{{- define "understudy.setEnv" -}}
{{- range $name := list "UNDERSTUDY_GRPC_PORT" "UNDERSTUDY_HTTP_PORT" -}}
{{- if hasKey $.env $name }}{{ fail (printf "%s cannot be set: services, probes and network policies have the ports 8500 and 8501" $name) }}{{ end -}}
{{- end -}}
{{- $container := index .pod.containers 0 -}}
{{- $env := list -}}
{{- range $container.env }}{{ if not (hasKey $.env .name) }}{{ $env = append $env . }}{{ end }}{{ end -}}
{{- range $name, $value := .env -}}
{{- $env = append $env (dict "name" $name "value" (include "understudy.text" $value)) -}}
{{- end -}}
{{- $_ := set $container "env" $env -}}
{{- end -}}

{{- /* Apply the values that all containers have: root, pod (its spec), args and options (with args and resources). */ -}}
{{- define "understudy.apply" -}}
{{- $container := index .pod.containers 0 -}}
{{- $_ := set $container "image" (include "understudy.image" .root) -}}
{{- $_ := set $container "args" (concat .args .options.args) -}}
{{- with .options.resources }}{{ $_ := set $container "resources" . }}{{ end -}}
{{- with .root.Values.run.claim -}}
{{- $claim := . -}}
{{- range $.pod.volumes }}{{ if eq .name "run" }}{{ $_ := set .persistentVolumeClaim "claimName" $claim }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* Mount a secret: pod, name, secret. */ -}}
{{- define "understudy.mount" -}}
{{- $container := index .pod.containers 0 -}}
{{- $mount := dict "name" .name "mountPath" (printf "/etc/understudy/%s" .name) "readOnly" true -}}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts $mount) -}}
{{- $volume := dict "name" .name "secret" (dict "secretName" .secret "defaultMode" 288) -}}
{{- $_ := set .pod "volumes" (append .pod.volumes $volume) -}}
{{- end -}}

{{- /* Serve over TLS and for known callers, where the values have secrets for it: root, pod. */ -}}
{{- define "understudy.secure" -}}
{{- $container := index .pod.containers 0 -}}
{{- if .root.Values.tls.secret -}}
{{- include "understudy.mount" (dict "pod" .pod "name" "tls" "secret" .root.Values.tls.secret) -}}
{{- $env := list -}}
{{- range $container.env }}{{ if ne .name "UNDERSTUDY_INSECURE" }}{{ $env = append $env . }}{{ end }}{{ end -}}
{{- $env = append $env (dict "name" "UNDERSTUDY_TLS_CERT" "value" "/etc/understudy/tls/tls.crt") -}}
{{- $env = append $env (dict "name" "UNDERSTUDY_TLS_KEY" "value" "/etc/understudy/tls/tls.key") -}}
{{- $_ := set $container "env" $env -}}
{{- $_ := set $container.startupProbe.httpGet "scheme" "HTTPS" -}}
{{- $_ := set $container.livenessProbe.httpGet "scheme" "HTTPS" -}}
{{- $_ := set $container "readinessProbe" (dict "httpGet" (dict "path" "/readyz" "port" "http" "scheme" "HTTPS")) -}}
{{- end -}}
{{- if .root.Values.callers.secret -}}
{{- include "understudy.mount" (dict "pod" .pod "name" "callers" "secret" .root.Values.callers.secret) -}}
{{- $callers := dict "name" "UNDERSTUDY_CALLERS" "value" "/etc/understudy/callers/callers.toml" -}}
{{- $_ := set $container "env" (append $container.env $callers) -}}
{{- end -}}
{{- end -}}

{{- /* Follow the evaluator over the network instead of the run's volume: root, pod. */ -}}
{{- define "understudy.followNetwork" -}}
{{- $container := index .pod.containers 0 -}}
{{- $_ := set $container "args" (without $container.args "--run-dir=/run-folder") -}}
{{- $mounts := list -}}
{{- range $container.volumeMounts }}{{ if ne .name "run" }}{{ $mounts = append $mounts . }}{{ end }}{{ end -}}
{{- $_ := set $container "volumeMounts" $mounts -}}
{{- $volumes := list -}}
{{- range .pod.volumes }}{{ if ne .name "run" }}{{ $volumes = append $volumes . }}{{ end }}{{ end -}}
{{- $_ := set .pod "volumes" $volumes -}}
{{- $env := list (dict "name" "UNDERSTUDY_FOLLOW" "value" "understudy-evaluator:8500") -}}
{{- range $container.env }}{{ if ne .name "UNDERSTUDY_FOLLOW" }}{{ $env = append $env . }}{{ end }}{{ end -}}
{{- if .root.Values.tls.secret -}}
{{- $env = append $env (dict "name" "UNDERSTUDY_FOLLOW_TLS_CA" "value" "/etc/understudy/tls/ca.crt") -}}
{{- end -}}
{{- with .root.Values.fleet.followSecret -}}
{{- include "understudy.mount" (dict "pod" $.pod "name" "follow" "secret" .) -}}
{{- $env = append $env (dict "name" "UNDERSTUDY_FOLLOW_TOKEN_FILE" "value" "/etc/understudy/follow/token") -}}
{{- end -}}
{{- $_ := set $container "env" $env -}}
{{- end -}}

{{- /* Pin a server to a step, which it then serves instead of following: pod, step. */ -}}
{{- define "understudy.pin" -}}
{{- $container := index .pod.containers 0 -}}
{{- $env := list -}}
{{- range $container.env }}{{ if not (hasPrefix "UNDERSTUDY_FOLLOW" .name) }}{{ $env = append $env . }}{{ end }}{{ end -}}
{{- $_ := set $container "env" $env -}}
{{- include "understudy.setEnv" (dict "pod" .pod "env" (dict "UNDERSTUDY_VERSION_POLICY" .step)) -}}
{{- end -}}

{{- /* The fleet's manifest of a name, for its canary where `canary` is set: root, file, canary. */ -}}
{{- define "understudy.fleet" -}}
{{- $text := .root.Files.Get (printf "kubernetes/base/fleet/%s.yaml" .file) -}}
{{- if .canary -}}
{{- $text = $text | replace "component: fleet" "component: fleet-canary" | replace "name: understudy-fleet" "name: understudy-fleet-canary" -}}
{{- end -}}
{{- include "understudy.plain" (dict "root" .root "text" $text) -}}
{{- end -}}

{{- /* A service's manifest, which says that its servers speak no TLS only where that is so: root, text. */ -}}
{{- define "understudy.plain" -}}
{{- ternary (.text | replace ", appProtocol: kubernetes.io/h2c" "") .text (ne .root.Values.tls.secret "") -}}
{{- end -}}

{{- /* Have the evaluator use the cluster: root, pod. */ -}}
{{- define "understudy.onCluster" -}}
{{- $change := (.root.Files.Get "kubernetes/components/cluster/evaluator.yaml" | fromYaml).spec.template.spec -}}
{{- range $change.initContainers }}{{ $_ := set . "image" (include "understudy.image" $.root) }}{{ end -}}
{{- $_ := set .pod "initContainers" $change.initContainers -}}
{{- $container := index .pod.containers 0 -}}
{{- $_ := set $container "env" (concat (index $change.containers 0).env $container.env) -}}
{{- end -}}
