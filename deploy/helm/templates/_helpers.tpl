{{- define "pdmesh.labels" -}}
app.kubernetes.io/name: pdmesh
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Values of one kind of pod, as JSON. Given root, and own: its own values, which win. Maps are merged, and lists are joined. */}}
{{- define "pdmesh.values" -}}
{{- $values := pick .root.Values "settings" "extraEnv" "envFrom" "podLabels" "podAnnotations" "nodeSelector" "tolerations" "affinity"
      "topologySpreadConstraints" "runtimeClassName" "priorityClassName" "hostNetwork" "podSecurityContext" "securityContext"
      "sharedMemory" "startupSeconds" | deepCopy }}
{{- range $name, $value := .own }}
{{- $common := get $values $name }}
{{- if and $common (kindIs "map" $value) }}
{{- $value = mergeOverwrite $common (deepCopy $value) }}
{{- else if and $common (kindIs "slice" $value) }}
{{- $value = concat $common $value }}
{{- end }}
{{- $_ := set $values $name $value }}
{{- end }}
{{- toJson $values }}
{{- end }}

{{- /*
Metadata of a pod, and its spec but for the containers. All helpers of pods take one map: root; own, of pdmesh.values; labels, which tell
its pods from others; and what pdmesh.container takes.
*/}}
{{- define "pdmesh.pod" -}}
metadata:
  {{- with .name }}
  name: {{ . }}
  {{- end }}
  labels: {{- merge (include "pdmesh.labels" .root | fromYaml) .labels (.own.podLabels | default dict) | toYaml | nindent 4 }}
  {{- $scrape := dict }}
  {{- if and .port (not .root.Values.podMonitor.enabled) }}
  {{- $scrape = dict "prometheus.io/scrape" "true" "prometheus.io/port" .port "prometheus.io/scheme" (include "pdmesh.scheme" .root | lower) }}
  {{- end }}
  {{- with merge (.own.podAnnotations | default dict) $scrape }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  enableServiceLinks: false # else Kubernetes sets variables that look like settings
  shareProcessNamespace: true # else the service is process 1: an abort ends that with another signal, and orphans stay
  terminationGracePeriodSeconds: {{ add .root.Values.drainSeconds 10 }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .account }}
  serviceAccountName: {{ .account }}
  {{- end }}
  automountServiceAccountToken: {{ not (empty .account) }}
  securityContext: {{- toYaml .own.podSecurityContext | nindent 4 }}
  {{- if .own.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with .own.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .own.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .own.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .own.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  affinity:
    {{- if .own.affinity }}
    {{- toYaml .own.affinity | nindent 4 }}
    {{- else }}
    podAntiAffinity: # on different nodes where that can be
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 1
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels: {{- merge (include "pdmesh.labels" .root | fromYaml) .labels | toYaml | nindent 16 }}
    {{- end }}
  tolerations:
    - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: {{ .root.Values.unreachableSeconds }}}
    - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: {{ .root.Values.unreachableSeconds }}}
    {{- with .own.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if and .device .own.sharedMemory }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .own.sharedMemory }}}
    {{- end }}
    {{- if and .settings .root.Values.secretName }}
    - name: settings
      secret: {secretName: {{ .root.Values.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- if and .settings .root.Values.tls.secretName }}
    - name: tls
      secret: {secretName: {{ .root.Values.tls.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- if .model }}
    {{- include "pdmesh.volume" (dict "root" .root "name" "models" "source" .root.Values.modelVolume) | nindent 4 }}
    {{- end }}
    {{- if .device }}
    {{- include "pdmesh.volume" (dict "root" .root "name" "kernels" "source" .root.Values.kernelVolume) | nindent 4 }}
    {{- end }}
  {{- if and .model .root.Values.modelDownload.enabled (not .download) }}
  initContainers:
    - name: model
      command: [sh, -c, "until test -e {{ include "pdmesh.downloaded" .root }}; do sleep 2; done"]
      image: {{ .root.Values.image }}
      imagePullPolicy: {{ .root.Values.imagePullPolicy }}
      securityContext: {{- toYaml .own.securityContext | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models, readOnly: true}
      resources: {requests: {cpu: 10m, memory: 16Mi}}
  {{- end }}
{{- end }}

{{- /* Given the name and the source of a volume: a claim that the chart makes, or what Kubernetes takes as a source. */}}
{{- define "pdmesh.volume" -}}
{{- if .source.claim -}}
- name: {{ .name }}
  persistentVolumeClaim: {claimName: {{ .root.Release.Name }}-{{ .name }}}
{{- else if .source -}}
- name: {{ .name }}
  {{- toYaml .source | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The file that says that a model's download is complete. */}}
{{- define "pdmesh.downloaded" -}}
/models/huggingface/.complete-{{ sha256sum .Values.model | trunc 12 }}
{{- end }}

{{- /*
A container but for its name, command, ports and probes. Takes settings: those that the chart itself sets, which own settings override,
and without which there are no settings and secrets; env: variables that are no settings; model: whether it reads the model; download:
whether it writes it; device: whether it may compute on a device.
*/}}
{{- define "pdmesh.container" -}}
{{- $resources := concat (.own.resources.requests | default dict | keys) (.own.resources.limits | default dict | keys) | join "," }}
{{- $security := deepCopy .own.securityContext }}
{{- if contains "rdma/" $resources }}
{{- $added := append (dig "capabilities" "add" list $security) "IPC_LOCK" | uniq }}
{{- $security = mergeOverwrite $security (dict "capabilities" (dict "add" $added)) }}
{{- end -}}
image: {{ .root.Values.image }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
securityContext: {{- toYaml $security | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if and .device .own.sharedMemory }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
  {{- if and .settings .root.Values.secretName }}
  - {name: settings, mountPath: /etc/pdmesh, readOnly: true}
  {{- end }}
  {{- if and .settings .root.Values.tls.secretName }}
  - {name: tls, mountPath: /etc/pdmesh-tls, readOnly: true}
  {{- end }}
  {{- if and .model .root.Values.modelVolume }}
  - {name: models, mountPath: /models, readOnly: {{ not .download }}}
  {{- end }}
  {{- if and .device .root.Values.kernelVolume }}
  - {name: kernels, mountPath: /kernels}
  {{- end }}
env:
  - {name: HOME, value: /tmp}
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  {{- if and .settings .root.Values.secretName }}
  - {name: PDMESH_CONFIG, value: /etc/pdmesh/pdmesh.toml}
  {{- end }}
  {{- $settings := include "pdmesh.settings" .root | fromJson }}
  {{- if .model }}
  {{- $onVolume := .root.Values.modelDownload.enabled }}
  - {name: HF_HOME, value: {{ $onVolume | ternary "/models/huggingface" "/tmp/huggingface" }}}
  {{- if $onVolume }}
  - {name: XDG_CACHE_HOME, value: /models/cache} # for models of the package index
  {{- end }}
  {{- if and $onVolume (not .download) }}
  - {name: HF_HUB_OFFLINE, value: "1"} # the volume has all of it
  {{- else if .root.Values.hfToken.secretName }}
  - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .root.Values.hfToken.secretName }}, key: {{ .root.Values.hfToken.key }}}}}
  {{- end }}
  {{- with .root.Values.model }}
  {{- $_ := set $settings "MODEL" . }}
  {{- end }}
  {{- end }}
  {{- if .device }}
  {{- $_ := set $settings "WORKER_DEVICE" (contains "nvidia.com/" $resources | ternary "cuda" "cpu") }}
  {{- if .root.Values.kernelVolume }}
  - {name: FLASHINFER_WORKSPACE_BASE, value: /kernels}
  {{- end }}
  {{- end }}
  {{- range $name, $value := .env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
  {{- if .settings }}
  {{- range $name, $value := mergeOverwrite $settings .settings .own.settings }}
  - {name: PDMESH_{{ $name }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
  {{- end }}
  {{- end }}
  {{- with .own.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .own.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- toYaml .own.resources | nindent 2 }}
{{- end }}

{{- /* Settings of all services, as JSON. */}}
{{- define "pdmesh.settings" -}}
{{- $settings := dict "SCHEDULER_ADDRESS" (include "pdmesh.schedulers" .) "DRAIN_S" (toString .Values.drainSeconds)
      "TELEMETRY_METRICS_HOST" "0.0.0.0" }}
{{- if .Values.tls.secretName }}
{{- $_ := set $settings "SECURITY_TLS_CERT" "/etc/pdmesh-tls/tls.crt" }}
{{- $_ := set $settings "SECURITY_TLS_KEY" "/etc/pdmesh-tls/tls.key" }}
{{- $_ := set $settings "SECURITY_TLS_CA" "/etc/pdmesh-tls/ca.crt" }}
{{- $_ := set $settings "SECURITY_TLS_SERVER_NAME" (required "set tls.serverName to a name of the certificate" .Values.tls.serverName) }}
{{- else if .Values.trustedNetwork }}
{{- $_ := set $settings "SECURITY_TRUSTED_NETWORK" "true" }}
{{- else }}
{{- fail "set tls.secretName to a Secret with tls.crt, tls.key and ca.crt, or say trustedNetwork=true" }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{- define "pdmesh.scheme" -}}
{{ empty .Values.tls.secretName | ternary "HTTP" "HTTPS" }}
{{- end }}

{{- /* Given a port: a probe that waits for an answer, because a process that hangs still accepts connections. */}}
{{- define "pdmesh.live" -}}
httpGet: {path: /live, port: {{ .port }}, scheme: {{ include "pdmesh.scheme" .root }}}
timeoutSeconds: 6
{{- end }}

{{- /* The process is ended after a minute without an answer: on a busy machine answers are late. */}}
{{- define "pdmesh.liveness" -}}
{{ include "pdmesh.live" . }}
periodSeconds: 10
failureThreshold: 6
{{- end }}

{{- /* How long a pod may take to start. */}}
{{- define "pdmesh.patience" -}}
periodSeconds: 2
failureThreshold: {{ div (add .own.startupSeconds 1) 2 }}
{{- end }}

{{- define "pdmesh.schedulers" -}}
{{- $name := printf "%s-scheduler" .Release.Name }}
{{- if gt (int .Values.scheduler.replicas) 1 }}
{{- $addresses := list }}
{{- range $number := until (int .Values.scheduler.replicas) }}
{{- $addresses = append $addresses (printf "%s-%d.%s:7000" $name $number $name) }}
{{- end }}
{{- join "," $addresses }}
{{- else }}
{{- printf "%s:7000" $name }}
{{- end }}
{{- end }}
